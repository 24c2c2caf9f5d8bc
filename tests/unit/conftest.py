"""What the unit tests share: a wheel, and a package of small sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from precompiled import compiled_text

from warploom.generator import configurations, workers
from warploom.generator.toolchain import Component

FILES = {"one.h": "#pragma once\n", "deep/two.h": "int two;\n"}


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled in this process: that workers do it, tests of builds are about."""
    monkeypatch.setattr(workers.Worker, "compile", compiled_text)


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's configurations are the small ones: to expand its spaces takes 3 s.

    test_cli_kernels.py looks for kernels in all of them.
    """
    monkeypatch.setattr(configurations, "every", configurations.smoke)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Component]:
    """Return a function that makes a site-packages folder with one wheel of FILES in it."""

    def install(folder: str, record: bool = True) -> Component:
        site = tmp_path / folder
        part = Component("headers", "1.0", site / "headers" / "include", ".*", ("headers",))
        for name, text in FILES.items():
            path = part.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        information = site / "headers-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: headers\nVersion: 1.0\n"
        )
        if record:
            lines = [f"headers/include/{name},{digest},9" for name, digest in part.hashed().items()]
            lines += ["headers/__pycache__/x.pyc,,", "../../bin/tool,sha256=abc,1"]
            (information / "RECORD").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(site))
        return part

    return install

"""Who may import whom: the generator is free of torch, of the driver and of the runtime."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import warploom

ROOT = Path(__file__).parents[2]
IMPORT_THE_GENERATOR = """
import importlib, pkgutil
import warploom.generator as generator
names = [module.name for module in pkgutil.walk_packages(generator.__path__, "warploom.generator.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 5, names
"""


def modules_after(code: str, cwd: Path) -> set[str]:
    """Names in sys.modules of a fresh interpreter that ran `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps([*sys.modules]))"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def imported_names(path: Path, package: str) -> set[str]:
    """Every dotted name that the file at `path`, a module of `package`, imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def test_generator_loads_neither_torch_nor_cuda(tmp_path: Path) -> None:
    loaded = modules_after(IMPORT_THE_GENERATOR, tmp_path)
    unwanted = {"torch", "cuda.bindings.driver", "cuda.bindings.nvrtc", "warploom.runtime"}
    assert loaded & unwanted == set()


def test_generator_never_imports_the_runtime_or_torch_even_inside_a_function() -> None:
    unwanted = ("warploom.runtime", "torch", "cuda.bindings.driver")
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "generator").rglob("*.py")
        for name in imported_names(
            path, ".".join(["warploom", *path.parent.relative_to(ROOT).parts])
        )
        if f"{name}.".startswith(tuple(f"{prefix}." for prefix in unwanted))
    }
    assert found == set()


def test_neither_generator_nor_runtime_imports_tuning() -> None:
    paths = [path for room in ("generator", "runtime") for path in (ROOT / room).rglob("*.py")]
    assert len(paths) > 50
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in paths
        for name in imported_names(
            path, ".".join(["warploom", *path.parent.relative_to(ROOT).parts])
        )
        if f"{name}.".startswith("warploom.tuning.")
    }
    assert found == set()


def test_importing_warploom_is_cheap(tmp_path: Path) -> None:
    loaded = modules_after("import warploom", tmp_path)
    assert loaded & {"torch", "numpy", "pydantic", "jinja2", "warploom.runtime"} == set()


def test_every_public_name_is_there_when_used() -> None:
    assert [name for name in warploom.__all__ if not hasattr(warploom, name)] == []
    assert not hasattr(warploom, "no_such_name")

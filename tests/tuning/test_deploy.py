"""The Dockerfile of the documentation: its commands fill a store, and find all of it again."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from stand_ins import build_many, no_compiler

import warploom
from warploom.cli import main
from warploom.generator import build
from warploom.generator.launches import DeviceLimits
from warploom.generator.store import Store
from warploom.runtime import plan, records, targets

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
H200 = DeviceLimits(132, "NVIDIA H200")


@pytest.fixture(autouse=True)
def in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands run where the image has the checkout, without a user's records."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "own"))
    records.forget()
    yield
    records.forget()


def stages() -> list[list[str]]:
    """The instructions of each stage."""
    found: list[list[str]] = []
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("FROM "):
            found.append([])
        elif line and not line.startswith("#"):
            found[-1].append(line)
    return found


def commands(stage: Sequence[str]) -> list[list[str]]:
    """The arguments of every `warploom` that a stage runs."""
    return [shlex.split(line)[2:] for line in stage if line.startswith("RUN warploom ")]


def settings(stage: Sequence[str], kernels: Path) -> dict[str, str]:
    """The variables that a stage sets, with another place for its kernels."""
    words = [word for line in stage if line.startswith("ENV ") for word in line.split()[1:]]
    return {
        name: value.replace("/kernels", str(kernels))
        for name, _, value in (word.partition("=") for word in words)
    }


def run(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(main, [*arguments, "--json"])


def test_what_the_first_stage_stores_is_all_that_the_second_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds, runs = stages()
    assert commands(builds) == commands(runs) != []
    kernels = tmp_path / "kernels"
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_many", build_many)
        for name, value in settings(builds, kernels).items():
            patch.setenv(name, value)
        for arguments in commands(builds):
            result = run(arguments)
            assert result.exit_code == 0, result.stderr
    named = settings(runs, kernels)
    assert named["WARPLOOM_COMPILE"] == "forbid" and named["WARPLOOM_CACHE_PATH"] == str(kernels)
    monkeypatch.setattr(build, "find", no_compiler)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    for arguments in commands(runs):
        result = run(arguments)
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert (told["compiled"], told["stored before"]) == (0, len(told["kernels"]))
    monkeypatch.setenv("WARPLOOM_CACHE_PATH", "")
    assert run(commands(runs)[0]).exit_code == 1  # and a store without them fails the image


def test_what_the_image_runs_is_among_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/deploy/served.py, on an H200 that is made up and tensors without memory."""
    monkeypatch.setattr(build, "build_many", lambda specs, *_, **__: build_many(specs, Store(None)))
    named = {
        row["kernel"]
        for arguments in commands(stages()[0])
        for row in json.loads(run(arguments).stdout)["problems"]
    }
    monkeypatch.setattr(targets, "at_hand", lambda device: H200)
    plan.forget()
    drawn, shown = torch.empty, []

    def randn(*extents: int, device: str) -> torch.Tensor:
        assert device == "cuda"
        return drawn(extents, dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(warploom, "gemm", lambda a, b: drawn(0))
    monkeypatch.setattr(warploom, "attention", lambda *_, causal: drawn(0))
    explain = warploom.explain

    def explained(*operands: torch.Tensor, **keywords: bool) -> object:
        shown.append(explain(*operands, **keywords))  # type: ignore[call-overload]
        return shown[-1]

    monkeypatch.setattr(warploom, "explain", explained)
    runpy.run_path(str(DEPLOY / "served.py"))
    plan.forget()
    assert len(shown) == 2 and {one.kernel for one in shown} <= named


def test_a_kernel_that_was_compiled_for_a_shape_is_found_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really compiled, by the command; then there is no NVRTC, and a plan of the shape has it."""
    result = run(["compile", "gemm", "--shapes", "8x64x128", "--gpu", "h200"])
    assert result.exit_code == 0, result.stderr
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    monkeypatch.setattr(build, "find", no_compiler)
    monkeypatch.setattr(targets, "at_hand", lambda device: H200)
    plan.forget()
    a, b = torch.empty(8, 128).bfloat16(), torch.empty(64, 128).bfloat16().t()
    planned = warploom.plan(a, b)
    plan.forget()
    assert build.build(planned.choice.spec).cubin[:4] == b"\x7fELF"


def test_what_the_image_names_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    (torch_build,) = re.findall(r"'(torch==[0-9.]+)\+cpu'", text)
    assert torch_build in constraints
    paths = set(re.findall(r"docs/deploy/[a-z.]+(?=[ \"])", text))
    assert len(paths) >= 2 and all((ROOT / path).is_file() for path in paths)

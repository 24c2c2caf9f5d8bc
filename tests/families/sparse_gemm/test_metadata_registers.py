"""Machine code never loads metadata into registers that a running wgmma still reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import sass
from sparse_gemm_mutants import TWICE

from warploom.generator import nvrtc
from warploom.generator.build import build
from warploom.generator.configurations import smoke
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find

PROGRAM = sass.disassembler()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="nvdisasm is not installed")
EVERY = [
    one
    for path in smoke()
    for one in expand_file(path).specs
    if one.operation.family == "sparse_gemm"
]


def faults(cubin: bytes, folder: Path) -> list[str]:
    assert PROGRAM is not None
    listed, labels = sass.instructions(PROGRAM, cubin, folder / "kernel.cubin")
    words = {one.metadata for one in listed} - {None}
    assert len(words) >= 2, "the two copies of the loop have no registers of their own"
    assert any(one.waits_for == 1 for one in listed), "the wait for the stage before was not found"
    return [*sass.overwritten(listed, labels)]


@pytest.mark.parametrize("kernel", EVERY, ids=lambda kernel: kernel.name)
def test_no_word_is_overwritten_while_it_is_read(kernel: KernelSpec, tmp_path: Path) -> None:
    assert faults(build(kernel).cubin, tmp_path) == []


def test_a_word_that_is_overwritten_is_found(tmp_path: Path) -> None:
    """One copy of the loop body loads the next stage's words while the last stage's are read."""
    kernel = EVERY[0]
    source = render(kernel)
    assert TWICE in source
    once = source.replace(TWICE, "      multiply_stage(k_tile, even, even);\n")
    toolchain = find()
    artifact = nvrtc.compile(once, name=kernel.name, arch=kernel.arch, toolchain=toolchain)
    listed, labels = sass.instructions(str(PROGRAM), artifact.cubin, tmp_path / "kernel.cubin")
    assert [*sass.overwritten(listed, labels)]

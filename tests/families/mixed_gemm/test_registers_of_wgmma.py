"""Machine code never decodes weights into registers that a running wgmma still reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sass

from warploom.errors import WarploomError
from warploom.generator.build import build
from warploom.generator.configurations import smoke
from warploom.generator.families import family
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec

PROGRAM = sass.disassembler()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="nvdisasm is not installed")
SMOKE = [
    one
    for path in smoke()
    for one in expand_file(path).specs
    if one.operation.family == "mixed_gemm" and one.schedule.multiply == "wgmma"
]
# Stages of one slab and of several, by one consumer's rows of W and by two blocks of them.
TILES = [(128, 128, 128), (256, 128, 128), (64, 128, 256), (128, 256, 128)]


def by_channel() -> list[KernelSpec]:
    """Integers with a scale for each channel: what is issued last runs on into the next stage."""
    found = []
    for one in SMOKE:
        if one.operation.a != "int8" or one.operation.group:
            continue
        for tile in TILES:
            fields = {"tile": tile, "multiply": "wgmma", "scaled": "sums"}
            try:
                schedule = family("mixed_gemm").complete(one.arch, one.operation, fields)
                found.append(replace(one, schedule=schedule))
            except WarploomError:  # more registers than there are
                continue
    return list({one.name: one for one in found if one not in SMOKE}.values())


@pytest.mark.parametrize("kernel", [*SMOKE, *by_channel()], ids=lambda kernel: kernel.name)
def test_no_weight_is_overwritten_while_it_is_multiplied(
    kernel: KernelSpec, tmp_path: Path
) -> None:
    assert PROGRAM is not None
    listed, labels = sass.instructions(PROGRAM, build(kernel).cubin, tmp_path / "kernel.cubin")
    assert any(one.read_while_running for one in listed)
    assert [*sass.overwritten(listed, labels)] == []

"""What the generator says of the family: rules, launches, text and registers."""

from __future__ import annotations

from pathlib import Path

import pytest
from dequantize_weights import EVERY, spec
from precompiled import reports

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families import family
from warploom.generator.families.dequantize import (
    DequantizeOperation,
    DequantizeProblem,
    DequantizeShape,
)
from warploom.generator.launches import NO_GPU
from warploom.generator.render import render

FAMILY = family("dequantize")
INT4 = ("int4", 128, "bf16", "16-bit")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (("mxfp4", 32, "bf16", "16-bit"), "scale of mxfp4"),
        (("nvfp4", 32, "e4m3", "16-bit"), "group of nvfp4"),
        (("int8", 32, "bf16", "e4m3"), "format for activations e4m3"),
        (("int3", 32, "bf16", "16-bit"), "int3"),
    ],
)
def test_what_is_not_legal_is_told(kind: tuple[str, int, str, str], said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        spec(kind)


def test_kernels_of_every_format_compile_without_spills(update_golden: bool) -> None:
    """By the schedule with the fewest registers."""
    widest = {(kind[0], kind[3]): kind for kind in EVERY if kind[1]}  # the most scales, of fp32
    kernels = [spec(kind, slabs=4, ctas=8) for kind in widest.values()]
    path = Path(__file__).with_suffix(".json")
    for name, found in reports(kernels, path, renew=update_golden).items():
        assert all(one.clean for one in found.resources.values()), name


@pytest.mark.parametrize("experts", [1, 5])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 128), (65, 1300), (200, 4096)])
def test_ctas_have_every_slab_once(experts: int, n: int, k: int) -> None:
    blocks, deep = -(-n // 64), -(-k // 128)
    for slabs in (1, 2, 4, 8):
        kernel = spec(("int4", None, "bf16", "16-bit"), slabs=slabs)
        (launch,) = FAMILY.launches(kernel, DequantizeProblem(experts, n, k, k, n * k), NO_GPU)
        chunks = launch.parameters["chunks"]
        assert isinstance(chunks, int) and (chunks - 1) * slabs < deep <= chunks * slabs
        assert launch.grid == experts * blocks * chunks and launch.early


def test_what_takes_more_than_32_bits_is_refused() -> None:
    problem = DequantizeProblem(1 << 16, 1 << 20, 1 << 12, 1 << 12, 1 << 32)
    with pytest.raises(ProblemError, match="must be smaller"):
        FAMILY.launches(spec(INT4), problem, NO_GPU)


def test_only_formats_with_zero_points_read_any() -> None:
    for kind in EVERY:
        assert ("zeros" in render(spec(kind)).partition("struct Group")[2]) == (kind[0] == "uint4")


def test_bytes_are_those_of_slabs_and_of_the_result() -> None:
    work = FAMILY.work(
        DequantizeOperation("bf16", "mxfp4", 32, "e8m0"), DequantizeShape(2, 64, 256)
    )
    assert work is not None and work.flops == 0
    assert work.bytes == 2 * (2 * (4096 + 256) + 64 * 256 * 2)

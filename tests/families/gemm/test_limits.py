"""From which extents on a product is refused, before anything is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edges import H200, assert_edge

from warploom.errors import ProblemError
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmShape, Groups, complete
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch


def gemm(*, batched: bool = False, groups: Groups = "none", **schedule: Any) -> KernelSpec:
    operation = GemmOperation("bf16", "bf16", "bf16", batched=batched, groups=groups)
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, schedule))


PRODUCT = GemmProblem(8, 8, 64, pitch_a=64, pitch_b=64, pitch_d=8)
WIDE: dict[str, Any] = {"tile": (128, 256, 64), "cluster": (2, 1)}


@pytest.mark.parametrize(
    ("field", "schedule", "beside"),
    [
        ("m", WIDE, 128 * 2),
        ("n", WIDE, 256),
        ("n", WIDE | {"tile": (128, 128, 64), "cluster": (1, 2), "raster": "along_n"}, 128 * 2),
        ("k", WIDE, 64),
        ("k", {"tile": (64, 96, 64), "consumers": 1, "cluster_split_k": 4}, 64 * 4),
    ],
)
def test_an_extent_of_a_product_leaves_room_for_a_tile(
    field: str, schedule: dict[str, Any], beside: int
) -> None:
    assert_edge(gemm(**schedule), PRODUCT, field, LARGEST - beside)


@pytest.mark.parametrize(("roles", "beside"), [("cooperative", 132), ("pingpong", 2 * 132)])
def test_tiles_of_all_batches_leave_room_for_each_cluster_s_next(roles: str, beside: int) -> None:
    spec = gemm(batched=True, tile=(128, 128, 64), kernel_schedule=roles)
    assert_edge(spec, PRODUCT, "batches", LARGEST - beside, "m 8, n 8, batches ")


def test_rows_of_all_masked_batches_leave_room_for_a_tile() -> None:
    """A tile's first row is counted from the first batch on."""
    spec, batches = gemm(batched=True, groups="masked", **WIDE), replace(PRODUCT, batches=1024)
    assert_edge(spec, batches, "m", LARGEST - 128 * 2)


def test_a_band_of_tiles_is_counted() -> None:
    """group * tiles across is 2^32 at n 2^25: a division by 0."""
    spec = gemm(tile=(64, 8, 64), consumers=1, swizzle_size=1024, store="direct")
    assert_edge(spec, PRODUCT, "n", 8 * (2**21 - 1), "swizzle_size 1024 of 2097152 tiles")


@pytest.mark.parametrize("extents", [(2**31, 8, 8), (8, 2**31, 8), (8, 8, 2**40), (2**40, 1, 1)])
def test_dispatch_has_a_choice_that_launches_can_refuse(extents: tuple[int, int, int]) -> None:
    m, n, k = extents
    problem = GemmProblem(m, n, k, pitch_a=k, pitch_b=k, pitch_d=n)
    wanted = GemmOperation("bf16", "bf16", "bf16")
    choice = dispatch.choose(wanted, GemmShape(m, n, k), device=H200, requires="direct")
    with pytest.raises(ProblemError, match=f"[mnk] {max(extents)}: must be smaller"):
        family("gemm").launches(choice.spec, problem, H200)

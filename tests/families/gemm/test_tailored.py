"""Tailored schedules: tiles that fill whole waves of one product, by clusters of any size."""

from __future__ import annotations

import pytest

from warploom.generator.architectures import architecture
from warploom.generator.families.gemm import FAMILY, GemmOperation, GemmShape
from warploom.generator.families.gemm.model import Tiling
from warploom.generator.launches import DeviceLimits
from warploom.tuning.autotune.candidates import TAILORED, candidates

BF16 = GemmOperation("bf16", "bf16", "bf16")
GPU = DeviceLimits(132, "NVIDIA H200", "13.0")


@pytest.mark.parametrize(
    ("extents", "tile", "cluster", "swap"),
    [
        ((698, 4096, 4096), (176, 128), (2, 1), True),
        ((645, 1280, 6144), (112, 64), (2, 4), True),
        ((392, 5120, 2816), (144, 128), (1, 4), True),
        ((164, 3584, 3584), (96, 64), (2, 4), True),
    ],
)
def test_one_wave_of_tiles_as_wide_as_it_needs_is_offered(
    extents: tuple[int, int, int], tile: tuple[int, int], cluster: tuple[int, int], *, swap: bool
) -> None:
    """cuBLAS had these, or 8 rows of m less, and was up to 1.27 times as fast as any of a space."""
    shape = GemmShape(*extents)
    offered = [spec.schedule for spec in candidates(BF16, shape, GPU)[-TAILORED:]]
    found = [
        one for one in offered if (one.tile[:2], one.cluster, one.swap_ab) == (tile, cluster, swap)
    ]
    assert found and Tiling.of(found[0], shape, 132).waves == 1


@pytest.mark.parametrize("kinds", [("bf16", "bf16"), ("e4m3", "bf16"), ("int8", "int32")])
@pytest.mark.parametrize(
    "extents",
    [(1, 4096, 1536), (33, 8, 64), (1000, 1000, 8), (2048, 4096, 4096), (0, 64, 64), (300, 72, 5)],
)
def test_all_are_legal_few_and_leave_no_block_of_a_cluster_without_rows(
    extents: tuple[int, int, int], kinds: tuple[str, str]
) -> None:
    operation, shape = GemmOperation(kinds[0], kinds[0], kinds[1]), GemmShape(*extents)
    found = FAMILY.tailored(operation, shape, GPU)
    assert len({*found}) == len(found) < 100
    for one in found:
        assert not FAMILY.reasons(architecture("sm_90a"), operation, one)
        assert (one.cluster[0] - 1) * one.tile[0] < shape.m
        assert (one.cluster[1] - 1) * one.tile[1] < shape.n
        assert Tiling.of(one, shape, 132).waves <= 4


def test_batches_are_waves_too() -> None:
    batched = GemmOperation("bf16", "bf16", "bf16", batched=True)
    for one in FAMILY.tailored(batched, GemmShape(256, 256, 512, 40), GPU):
        assert Tiling.of(one, GemmShape(256, 256, 512, 40), 132).waves <= 4

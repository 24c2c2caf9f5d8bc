"""Blocks that load their operands together: every element, whoever is past the end of D or late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

import gemm_arena as arena
import gemm_cases as cases
import gemm_wider as wider
import pytest
import torch
from gemm_cases import short
from rooms import assert_repeats

from warploom.generator.artifact import Artifact
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.families.gemm.rules import CLUSTERS
from warploom.generator.specification import KernelSpec

pytestmark = pytest.mark.gpu
# By slices, by turns, of rows that are k; along m, n and both.
KERNELS = [
    cases.spec(tile, cluster=cluster, **others)
    for cluster in CLUSTERS
    if prod(cluster) > 2
    for tile, others in (
        ((64, 88), {"consumers": 1, "stages": 2}),
        ((88, 64), {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((128, 128), {"layouts": "col row", "a": "fp16"}),
        ((64, 192), {"kernel_schedule": "pingpong", "raster": "along_n", "swizzle_size": 3}),
        ((128, 64), {"batched": True, "layouts": "row row", "epilogue": cases.ORDERS["vectors"]}),
        ((192, 128), {"swap_ab": True, "layouts": "col col"}),
        ((128, 96), {"a": "int8", "store": "direct"}),
        ((128, 160), {"a": "e4m3", "epilogue": cases.SCALES}),
        (
            (128, 64),
            {"a": "e4m3", "b": "e5m2", "accumulation": "promoted", "epilogue": cases.SCALES},
        ),
        ((64, 72), {"consumers": 1, "epilogue": cases.BACKWARD, "d": "fp32"}),
    )
]
over_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=short)
Shape = tuple[int, int, int]
# Of the rows and columns of a block's tile, and of a cluster's.
SHAPES: dict[str, Callable[[Shape, Shape], Shape]] = {
    "one element": lambda tile, whole: (1, 1, 1),
    "only the first block has a part of D": lambda tile, whole: (tile[0] - 3, tile[1] - 5, 296),
    "ragged": lambda tile, whole: (whole[0] + tile[0] + 1, whole[1] - tile[1] // 2, 193),
    "many k tiles": lambda tile, whole: (whole[0] - 7, whole[1] - 3, 4099),
    "blocks have several tiles": lambda tile, whole: (3 * whole[0] - 9, 24 * whole[1] - 3, 568),
}


@pytest.fixture(scope="module", autouse=True)
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> None:
    artifacts = build(KERNELS)
    assert all(one.resources[one.name].spill_bytes == 0 for one in artifacts.values())
    assert [one.name for one in artifacts.values() if one.serialised] == []


def call(kernel: KernelSpec, shape: str, seed: int = 0) -> arena.Call:
    schedule = cast("GemmSchedule", kernel.schedule)
    m, n, k = schedule.tile
    clusters = (m * schedule.cluster[0], n * schedule.cluster[1], k)
    batched = cast("GemmOperation", kernel.operation).batched
    extents = cases.fitting(SHAPES[shape](schedule.tile, clusters), kernel)
    batches = wider.BATCHES["repeated" if batched else "one"]
    return arena.call(kernel, *extents, seed=seed, batches=batches)


@pytest.mark.parametrize("shape", SHAPES)
@over_kernels
def test_every_block_has_its_own_rows_and_columns(kernel: KernelSpec, shape: str) -> None:
    arena.verify(call(kernel, shape))


@over_kernels
def test_no_stage_is_filled_before_all_that_share_it_have_read_it(kernel: KernelSpec) -> None:
    """What a block's neighbours overwrite depends on who is late: results would not repeat."""
    made = call(kernel, "blocks have several tiles", seed=1)
    arena.verify(made)
    outputs = [made.d, *made.outputs]

    def run() -> list[torch.Tensor]:
        made.run()
        return [output.room for output in outputs]

    assert_repeats(run, [output.room.clone() for output in outputs], outputs, runs=50)

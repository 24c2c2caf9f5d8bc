"""The second launch of `split_k`: it adds up the partial tiles of all parts of k, in one order, and
has the epilogue and the store.

A block of one warpgroup has a chunk of a tile: 64 rows of wgmma by as few columns as the store
takes, so that there are enough blocks for L2's bandwidth where D is small.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom.generator import limits
from warploom.generator.families._product.launch import AtLaunch
from warploom.generator.families._product.layout import ProductLayout
from warploom.generator.families._product.problem import tiles
from warploom.generator.launches import Launch, Value
from warploom.generator.wgmma import WARPGROUP, WGMMA_M

IN_FLIGHT = 16  # fragments of parts, 4 registers each, that a thread reads at a time
FRAGMENT = 8  # columns of wgmma


def parts_at_once(layout: ProductLayout) -> int:
    """Parts of k that a thread reads at a time: all fragments of its chunk of each."""
    return max(1, IN_FLIGHT * FRAGMENT // layout.chunk_columns)


def launches(at: AtLaunch, values: Mapping[str, Value]) -> list[Launch]:
    """The launch that adds up, where there are parts; ProblemError for too many blocks of it."""
    schedule, layout, problem = at.schedule, at.layout, at.problem
    if schedule.split_k == 1:
        return []
    chunks = schedule.rows // WGMMA_M * (schedule.columns // layout.chunk_columns)
    grid = tiles(schedule, problem) * schedule.multicast * chunks
    n = f"m {problem.m}, n {problem.n}, batches {problem.batches}"
    limits.refuse_beyond({f"{n}: blocks that add up parts of k": grid})
    return [
        Launch(
            f"{at.spec.name}_reduction",
            grid,
            WARPGROUP,
            1,
            layout.reduction_bytes,
            values,
            early=True,
        )
    ]

"""Sums over the rows of D in two launches: the product's stores those of a few rows each, and one
launch for each such step adds these up, in one order.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom.generator.families._product.launch import AtLaunch
from warploom.generator.families._product.parameters import partial_name
from warploom.generator.families._product.problem import Extents, row_groups
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.launches import Launch, Value, Workspace
from warploom.generator.specification import KernelSpec

ProductSpec = KernelSpec[ProductOperation, ProductSchedule]

COLUMNS, THREADS = 32, 1024  # of a block that adds up; a warp has a row of its columns


def _steps(spec: ProductSpec) -> list[int]:
    return [index for index, step in enumerate(spec.operation.epilogue) if step.partial]


def workspaces(
    spec: KernelSpec[ProductOperation, ProductSchedule], problem: Extents
) -> list[Workspace]:
    """The partial sums of each step that has some: fp32, for each group of rows and each column."""
    size = 4 * problem.batches * row_groups(spec.schedule, problem) * problem.n
    return [
        Workspace(f"{partial_name(spec.operation, index)}_partial", size) for index in _steps(spec)
    ]


def grids(at: AtLaunch) -> dict[int, int]:
    """The blocks that add up the partial sums of each step that has some, by its index."""
    blocks = -(-at.problem.n // COLUMNS)
    return {index: blocks * at.vectors(index) for index in _steps(at.spec)}


def launches(at: AtLaunch, values: Mapping[str, Value]) -> list[Launch]:
    """The launches that add them up, in order."""
    return [
        Launch(
            f"{at.spec.name}_{partial_name(at.operation, index)}",
            grid,
            THREADS,
            1,
            0,
            values,
            early=True,
        )
        for index, grid in grids(at).items()
    ]

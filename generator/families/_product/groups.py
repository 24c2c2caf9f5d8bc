"""Groups of rows that end at offsets in device memory: what is known of them before a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from warploom.errors import ProblemError
from warploom.generator.families._product.schedule import ProductSchedule

ProblemT = TypeVar("ProblemT", bound=Any)

MOST_GROUPS = 1024
"""Groups of a grouped GEMM: a CTA has their ends in shared memory."""


def table_bytes(tables: int) -> int:
    """Shared memory of tables with an entry for each group, and one more in front."""
    return -(-4 * tables * (MOST_GROUPS + 1) // 16) * 16


def most_tiles(schedule: ProductSchedule, problem: ProblemT) -> ProblemT:
    """The GEMM of as many tiles as groups of rows may have, whatever their offsets are.

    Each has whole tiles of its own, of which all groups but one may fill one with a single row.
    """
    rows = schedule.tile[0] * schedule.cluster[0]
    groups = min(problem.batches, problem.m)
    most: ProblemT = replace(problem, m=(-(-problem.m // rows) + groups - 1) * rows, batches=1)
    return most


def refuse_groups(groups: int) -> None:
    """Raise ProblemError for more groups than a table has entries."""
    if groups > MOST_GROUPS:
        raise ProblemError(
            f"{groups} groups",
            rule=f"must be at most {MOST_GROUPS}, whose ends a CTA keeps in shared memory",
            fix="call it for some of the groups at a time",
        )

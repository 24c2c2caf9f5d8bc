"""One call of GEMM: extents, pitches and batches."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families.gemm.schedule import GemmSchedule
from warploom.generator.families.gemm.shape import GemmShape


@dataclass(frozen=True, slots=True)
class Batches:
    """How the batches of A or B lie, where D has some: `count` of its own, `pitch` elements apart.

    Each serves `repeat` batches of D in a row; after the last comes the first again.
    """

    count: int = 1
    pitch: int = 0
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """The extents of one call, and the pitch of each matrix: elements from row to row (or from
    column to column) of the memory it lies in. `pitch_c` has one entry for each matrix that a step
    reads or stores.

    A batched operation has the number of D's batches, how those of A and B lie, and the elements
    between the batches of D and of each step's operand that has a `batch_field`.
    """

    m: int
    n: int
    k: int
    pitch_a: int
    pitch_b: int
    pitch_d: int
    pitch_c: tuple[int, ...] = ()
    batches: int = 1
    batches_a: Batches = Batches()
    batches_b: Batches = Batches()
    batch_pitch_d: int = 0
    batch_pitch_steps: tuple[int, ...] = ()


def tiles(schedule: GemmSchedule, problem: GemmProblem | GemmShape) -> int:
    """The tiles of all batches of D, counted in clusters: each block has one, or shares it."""
    rows = schedule.tile[0] * schedule.cluster[0]
    columns = schedule.tile[1] * schedule.cluster[1]
    return -(-problem.m // rows) * -(-problem.n // columns) * problem.batches


def rows_of_partial(schedule: GemmSchedule) -> int:
    """The rows of D of one partial sum: those of wgmma that a warp has of a fragment."""
    return 8 if schedule.swap else 16


def row_groups(schedule: GemmSchedule, problem: GemmProblem) -> int:
    """The partial sums of a column of one batch of D."""
    return -(-problem.m // rows_of_partial(schedule))

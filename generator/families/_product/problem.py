"""One call of a product, as far as tiles, epilogue and store depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from warploom.generator.families._product.schedule import ProductSchedule


@dataclass(frozen=True, slots=True)
class Batches:
    """How the batches of A or B lie, where D has some: `count` of its own, `pitch` elements apart.

    Each serves `repeat` batches of D in a row; after the last comes the first again.
    """

    count: int = 1
    pitch: int = 0
    repeat: int = 1


SINGLE = Batches()


class Extents(Protocol):
    """What of a product decides its tiles."""

    @property
    def m(self) -> int:
        """Rows of D."""
        ...

    @property
    def n(self) -> int:
        """Columns of D."""
        ...

    @property
    def k(self) -> int:
        """Products summed."""
        ...

    @property
    def batches(self) -> int:
        """Batches of D."""
        ...


class ProductProblem(Extents, Protocol):
    """And how its matrices lie: pitches are elements from row to row, and from batch to batch."""

    @property
    def pitch_a(self) -> int:
        """Of A's rows."""
        ...

    @property
    def pitch_d(self) -> int:
        """Of D's rows."""
        ...

    @property
    def pitch_c(self) -> tuple[int, ...]:
        """Of the rows of each matrix that a step reads or stores."""
        ...

    @property
    def batches_a(self) -> Batches:
        """How A's batches lie."""
        ...

    @property
    def batch_pitch_d(self) -> int:
        """Of D's batches."""
        ...

    @property
    def batch_pitch_steps(self) -> tuple[int, ...]:
        """Of the batches of each step's operand that has a `batch_field`."""
        ...


def tiles(schedule: ProductSchedule, problem: Extents) -> int:
    """The tiles of all batches of D, counted in clusters: each block has one, or shares it."""
    rows = schedule.tile[0] * schedule.cluster[0]
    columns = schedule.tile[1] * schedule.cluster[1]
    return -(-problem.m // rows) * -(-problem.n // columns) * problem.batches


def parts_of_k(schedule: ProductSchedule, problem: Extents) -> int:
    """The parts that a second launch adds up: each has a k tile at least."""
    k_tiles = -(-problem.k // (schedule.tile[2] * schedule.split))
    return max(1, min(schedule.split_k, k_tiles))


def rows_of_partial(schedule: ProductSchedule) -> int:
    """The rows of D of one partial sum: those of wgmma that a warp has of a fragment."""
    return 8 if schedule.swap else 16


def row_groups(schedule: ProductSchedule, problem: Extents) -> int:
    """The partial sums of a column of one batch of D."""
    return -(-problem.m // rows_of_partial(schedule))

"""One call of GEMM: extents, pitches and batches."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families._product import SINGLE, Batches


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
    batches_a: Batches = SINGLE
    batches_b: Batches = SINGLE
    batch_pitch_d: int = 0
    batch_pitch_steps: tuple[int, ...] = ()

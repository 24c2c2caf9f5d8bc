"""One call of a product with weights of few bits: extents and pitches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from warploom.generator import configurations
from warploom.generator.families._product import SINGLE, Batches
from warploom.generator.families._product.cells import layers
from warploom.generator.families.mixed_gemm.operation import MixedGemmOperation
from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class MixedGemmShape(Shape):
    """A [m, k] by W [n, k]; batches of A are rows of it."""

    calls: ClassVar[frozenset[str]] = frozenset({"m"})

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        """4096x6144x4096."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def batches(self) -> int:
        """There is one product."""
        return 1


def cells(
    operation: MixedGemmOperation, model: str | None, rows: Sequence[int]
) -> list[MixedGemmShape]:
    """The weights of a model, or those that are measured, where they are of whole groups."""
    listed = configurations.cells()["mixed_gemm"]
    weights = layers(model) if model else listed["weights"]
    whole = [(n, k) for n, k in weights if k % (operation.group or 1) == 0]
    return [MixedGemmShape(m, n, k) for n, k in whole for m in rows or listed["m"]]


@dataclass(frozen=True, slots=True)
class MixedGemmProblem:
    """The extents of one call, and the pitch of each matrix: elements from row to row of the memory
    it lies in. `pitch_c` has one entry for each matrix that a step reads or stores.

    W lies in slabs that are full, whatever n and k are: see generator/slabs.py.
    """

    m: int
    n: int
    k: int
    pitch_a: int
    pitch_d: int
    pitch_c: tuple[int, ...] = ()

    @property
    def batches(self) -> int:
        """There is one product."""
        return 1

    @property
    def batches_a(self) -> Batches:
        """A is one matrix."""
        return SINGLE

    @property
    def batch_pitch_d(self) -> int:
        """D is one matrix."""
        return 0

    @property
    def batch_pitch_steps(self) -> tuple[int, ...]:
        """What steps read has no batches of its own."""
        return ()

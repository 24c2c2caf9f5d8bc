"""D = epilogue(A W'): weights W of 4 or 8 bits that lie in slabs, activations A of 8 or 16."""

from __future__ import annotations

from warploom.generator.families._product.cells import refuse_batches
from warploom.generator.families.base import Family
from warploom.generator.families.mixed_gemm.launch import MixedGemmProblem, MixedGemmShape
from warploom.generator.families.mixed_gemm.layout import MixedGemmLayout, mixed_gemm_layout
from warploom.generator.families.mixed_gemm.schedule import (
    Format,
    MixedGemmOperation,
    MixedGemmSchedule,
    MixedGemmSpec,
)

__all__ = [
    "FAMILY",
    "Format",
    "MixedGemmOperation",
    "MixedGemmProblem",
    "MixedGemmSchedule",
    "MixedGemmShape",
]


class MixedGemm(Family[MixedGemmOperation, MixedGemmSchedule, MixedGemmShape, MixedGemmProblem]):
    """Products with weights of few bits."""

    def layout(self, spec: MixedGemmSpec) -> MixedGemmLayout:
        """Shared memory and registers: see layout.py."""
        return mixed_gemm_layout(spec.operation, spec.schedule)

    def refuse_shape(self, operation: MixedGemmOperation, shape: MixedGemmShape) -> None:
        """Raise ProblemError for batches of an operation that has none."""
        refuse_batches(shape, batched=operation.batched)


FAMILY = MixedGemm()

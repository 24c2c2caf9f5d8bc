"""Which operations share their tuned configs."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families.sparse_gemm.schedule import (
    SparseGemmOperation,
    SparseGemmSchedule,
)
from warploom.generator.families.sparse_gemm.shape import SparseGemmShape
from warploom.generator.families.table import Table


class SparseGemmTable(Table[SparseGemmOperation, SparseGemmSchedule, SparseGemmShape]):
    """Schedules of classes of rows and columns."""

    advice = "convert the operands, or choose another out_dtype"

    def timed_as(self, operation: SparseGemmOperation) -> SparseGemmOperation:
        """bf16, or e4m3 with scales: bytes of an element decide, and epilogues take little."""
        if element(operation.element).bits == 16:
            return SparseGemmOperation("bf16")
        return SparseGemmOperation("e4m3", output="bf16", scaled=True)

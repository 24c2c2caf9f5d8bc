"""y = activation(x W' + bias): a weight W that is 2:4 sparse, multiplied by `wgmma.sp`."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import activation_class, function_parts
from warploom.generator.families.base import Family
from warploom.generator.families.sparse_gemm.header import described
from warploom.generator.families.sparse_gemm.schedule import (
    SWIZZLE_SIZE,
    SparseGemmLayout,
    SparseGemmOperation,
    SparseGemmProblem,
    SparseGemmSchedule,
    SparseGemmShape,
    SparseGemmSpec,
)

__all__ = [
    "FAMILY",
    "SparseGemmOperation",
    "SparseGemmProblem",
    "SparseGemmSchedule",
    "SparseGemmShape",
]


class SparseGemm(
    Family[SparseGemmOperation, SparseGemmSchedule, SparseGemmShape, SparseGemmProblem]
):
    """Products with weights of which two of each four neighbours along k are zero."""

    def layout(self, spec: SparseGemmSpec) -> SparseGemmLayout:
        """The shared memory of a block."""
        return SparseGemmLayout(spec.operation, spec.schedule)

    def context(self, spec: SparseGemmSpec) -> dict[str, Any]:
        """The elements, and the parts of the activation."""
        function = spec.operation.activation
        return {
            "element": element(spec.operation.element),
            "output": element(spec.operation.of_output),
            "swizzle_size": SWIZZLE_SIZE,
            "header": described(spec, self.layout(spec)),
            "activation_parts": ()
            if function == "none"
            else function_parts(function, gradient=False),
            "activation_class": "" if function == "none" else activation_class(function),
        }


FAMILY = SparseGemm()

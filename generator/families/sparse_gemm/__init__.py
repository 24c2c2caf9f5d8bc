"""y = activation(x W' + bias): a weight W that is 2:4 sparse, multiplied by `wgmma.sp`."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import activation_class, function_parts
from warploom.generator.families.base import Family
from warploom.generator.families.sparse_gemm.header import described, summary
from warploom.generator.families.sparse_gemm.schedule import (
    SWIZZLE_SIZE,
    SparseGemmLayout,
    SparseGemmOperation,
    SparseGemmProblem,
    SparseGemmSchedule,
    SparseGemmShape,
    SparseGemmSpec,
)
from warploom.generator.wgmma import wgmma

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
        """The elements, the files of a kernel's options, and the parts of the activation."""
        operation: SparseGemmOperation = spec.operation
        kind, function = element(operation.element), operation.activation
        return {
            "parts": _options(operation, spec.schedule),
            "d": element(operation.of_output),
            "accumulator": operation.accumulator,
            "wgmma": wgmma(kind, kind, spec.schedule.tokens, has_k=False, sparse=True),
            "swizzle_size": SWIZZLE_SIZE,
            "summary": summary(spec),
            "header": described(spec, self.layout(spec)),
            "activation_parts": ()
            if function == "none"
            else function_parts(function, gradient=False),
            "activation_class": "" if function == "none" else activation_class(function),
        }


def _options(operation: SparseGemmOperation, schedule: SparseGemmSchedule) -> list[str]:
    """The files of a kernel's options, in the order in which hooks include them."""
    eight = element(operation.element).bits == 8
    applies = {
        "elements_8": eight,
        "elements_16": not eight,
        "scaled": operation.scaled,
        "unscaled": not operation.scaled,
        "bias": operation.bias,
        "activation": operation.activation != "none",
        "split_k": schedule.split_k > 1,
        "whole_k": schedule.split_k == 1,
    }
    return [f"sparse_gemm/{name}.cuh.jinja" for name, has in applies.items() if has]


FAMILY = SparseGemm()

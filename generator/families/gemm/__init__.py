"""GEMM: D[m, n] = epilogue(A[m, k] B[k, n]), on Hopper's TMA and wgmma."""

from __future__ import annotations

from dataclasses import replace

from warploom.generator.epilogue import Bias
from warploom.generator.families._product.cells import refuse_batches
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families.base import Family
from warploom.generator.families.gemm.launch import GemmProblem, ScaleStrides
from warploom.generator.families.gemm.layout import GemmLayout, gemm_layout
from warploom.generator.families.gemm.rules import complete
from warploom.generator.families.gemm.schedule import (
    SCALE_BLOCK,
    SPARSE_BLOCK,
    Accumulation,
    BlockScale,
    BlockScales,
    GemmOperation,
    GemmSchedule,
    GemmSpec,
    Groups,
    Layout,
    Spans,
    Sparse,
)
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.models import Model

__all__ = [
    "FAMILY",
    "MOST_GROUPS",
    "SCALE_BLOCK",
    "SPARSE_BLOCK",
    "Accumulation",
    "BlockScale",
    "BlockScales",
    "GemmOperation",
    "GemmProblem",
    "GemmSchedule",
    "GemmShape",
    "Groups",
    "Layout",
    "ScaleStrides",
    "Spans",
    "Sparse",
    "complete",
    "gemm_layout",
]


class Gemm(Family[GemmOperation, GemmSchedule, GemmShape, GemmProblem]):
    """Matrix products with an epilogue."""

    def of_model(self, operation: GemmOperation, model: Model) -> list[GemmOperation]:
        """In the model's type; with a bias, too, where layers have one."""
        kind = model.element
        plain = replace(operation, a=kind, b=kind, d=kind)
        biased = [replace(plain, epilogue=(Bias(kind),))] if model.weights(biased=True) else []
        return [plain, *biased]

    def layout(self, spec: GemmSpec) -> GemmLayout:
        """Shared memory and registers: see layout.py."""
        return gemm_layout(spec.operation, spec.schedule)

    def refuse_shape(self, operation: GemmOperation, shape: GemmShape) -> None:
        """Raise ProblemError for batches of an operation that has none."""
        refuse_batches(shape, batched=operation.batched)


FAMILY = Gemm()

"""GEMM: D[m, n] = epilogue(A[m, k] B[k, n]), on Hopper's TMA and wgmma."""

from __future__ import annotations

from dataclasses import replace

from warploom.generator.epilogue import Bias
from warploom.generator.families.family import Family
from warploom.generator.families.gemm import launch, model, rules, template
from warploom.generator.families.gemm.launch import GemmProblem, ScaleStrides, parameters
from warploom.generator.families.gemm.layout import GemmLayout, gemm_layout
from warploom.generator.families.gemm.rules import complete
from warploom.generator.families.gemm.schedule import (
    SCALE_BLOCK,
    Accumulation,
    BlockScale,
    BlockScales,
    GemmOperation,
    GemmSchedule,
    GemmSpec,
    Layout,
)
from warploom.generator.families.gemm.shape import (
    GemmShape,
    cells,
    extents_of_cell,
    parse_shape,
)
from warploom.generator.families.gemm.table import GemmTable
from warploom.generator.families.gemm.tailored import tailored
from warploom.generator.models import Model

__all__ = [
    "FAMILY",
    "SCALE_BLOCK",
    "Accumulation",
    "BlockScale",
    "BlockScales",
    "GemmOperation",
    "GemmProblem",
    "GemmSchedule",
    "GemmShape",
    "Layout",
    "ScaleStrides",
    "complete",
    "gemm_layout",
]


class Gemm(Family[GemmOperation, GemmSchedule, GemmShape, GemmProblem]):
    """Matrix products with an epilogue."""

    operation = GemmOperation
    schedule = GemmSchedule
    shape = GemmShape
    constants = model.START
    table = GemmTable()

    operation_reasons = staticmethod(rules.operation_reasons)
    schedule_reasons = staticmethod(rules.schedule_reasons)
    complete = staticmethod(complete)
    tailored = staticmethod(tailored)
    parameters = staticmethod(parameters)
    context = staticmethod(template.context)
    launches = staticmethod(launch.launches)
    workspaces = staticmethod(launch.workspaces)
    parse_shape = staticmethod(parse_shape)
    cells = staticmethod(cells)

    def of_model(self, operation: GemmOperation, model: Model) -> list[GemmOperation]:
        """In the model's type; with a bias, too, where layers have one."""
        kind = model.element
        plain = replace(operation, a=kind, b=kind, d=kind)
        biased = [replace(plain, epilogue=(Bias(kind),))] if model.weights(biased=True) else []
        return [plain, *biased]

    extents_of_cell = staticmethod(extents_of_cell)
    seconds = staticmethod(model.seconds)

    def layout(self, spec: GemmSpec) -> GemmLayout:
        """Shared memory and registers: see layout.py."""
        return gemm_layout(spec.operation, spec.schedule)


FAMILY = Gemm()

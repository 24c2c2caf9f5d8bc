"""GEMM: D[m, n] = epilogue(A[m, k] B[k, n]), on Hopper's TMA and wgmma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warploom.generator.architectures import Architecture
from warploom.generator.families.family import Family
from warploom.generator.families.gemm import launch, model, rules, shape, template
from warploom.generator.families.gemm.layout import GemmLayout, gemm_layout
from warploom.generator.families.gemm.parameters import parameters
from warploom.generator.families.gemm.problem import Batches, GemmProblem, tiles
from warploom.generator.families.gemm.rules import complete
from warploom.generator.families.gemm.schedule import (
    Accumulation,
    GemmOperation,
    GemmSchedule,
    GemmSpec,
    Layout,
)
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.families.gemm.table import GemmTable, Store
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.parameters import ParameterBlock

__all__ = [
    "FAMILY",
    "Accumulation",
    "Batches",
    "GemmLayout",
    "GemmOperation",
    "GemmProblem",
    "GemmSchedule",
    "GemmShape",
    "GemmSpec",
    "Layout",
    "Store",
    "complete",
    "gemm_layout",
    "tiles",
]


class Gemm(Family[GemmOperation, GemmSchedule, GemmShape, GemmProblem]):
    """Matrix products with an epilogue."""

    operation = GemmOperation
    schedule = GemmSchedule
    shape = GemmShape
    constants = model.START
    table = GemmTable()

    def operation_reasons(self, operation: GemmOperation) -> list[str]:
        """Why the operation is not legal; empty when it is."""
        return rules.operation_reasons(operation)

    def schedule_reasons(
        self, arch: Architecture, operation: GemmOperation, schedule: GemmSchedule
    ) -> list[str]:
        """Why the schedule does not fit the operation on `arch`; empty when it does."""
        return rules.schedule_reasons(arch, operation, schedule)

    def complete(
        self, arch: str, operation: GemmOperation, fields: Mapping[str, Any]
    ) -> GemmSchedule:
        """Make a schedule of `fields`; `stages: auto` becomes as many as fill shared memory."""
        return rules.complete(arch, operation, fields)

    def layout(self, spec: GemmSpec) -> GemmLayout:
        """Shared memory and registers: see layout.py."""
        return gemm_layout(spec.operation, spec.schedule)

    def parameters(self, spec: GemmSpec) -> ParameterBlock[Any]:
        """The parameter block of the spec's kernels."""
        return parameters(spec)

    def context(self, spec: GemmSpec) -> dict[str, Any]:
        """What the template is rendered with: see template.py."""
        return template.context(spec)

    def launches(self, spec: GemmSpec, problem: GemmProblem, device: DeviceLimits) -> list[Launch]:
        """The kernel launches of one call: see launch.py."""
        return launch.launches(spec, problem, device)

    def parse_shape(self, operation: GemmOperation, text: str) -> GemmShape:
        """The shape that `text` is: see shape.py."""
        return shape.parse_shape(operation, text)

    def cells(
        self, operation: GemmOperation, model: str | None, rows: Sequence[int]
    ) -> Sequence[GemmShape]:
        """The cells of an operation: see shape.py."""
        return shape.cells(operation, model, rows)

    def extents_of_cell(self, problem: Mapping[str, Any]) -> dict[str, Any] | None:
        """The extents of the problem of a benchmark's result: see shape.py."""
        return shape.extents_of_cell(problem)

    def seconds(
        self,
        constants: Mapping[str, float],
        operation: GemmOperation,
        schedule: GemmSchedule,
        shape: GemmShape,
        multiprocessors: int,
    ) -> float:
        """The seconds that one call should take: see model.py."""
        return model.seconds(constants, operation, schedule, shape, multiprocessors)


FAMILY = Gemm()

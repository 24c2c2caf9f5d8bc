"""The parameter block of a GEMM: what every kernel reads, then the fields of each step."""

from __future__ import annotations

from functools import cached_property

from warploom.generator.families._product import launch
from warploom.generator.families._product.parameters import extents, finished, operand_a
from warploom.generator.families.gemm.layout import GemmLayout, gemm_layout
from warploom.generator.families.gemm.problem import GemmProblem
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule, GemmSpec
from warploom.generator.parameters import Field, ParameterBlock, block, int32, tensor_map
from warploom.generator.tensor_maps import TensorMap


class AtLaunch(launch.AtLaunch[GemmOperation, GemmSchedule, GemmProblem]):
    """What a GEMM's parameters are functions of."""

    @cached_property
    def layout(self) -> GemmLayout:
        """Where everything of one block lies."""
        return gemm_layout(self.operation, self.schedule)

    def b_map(self) -> TensorMap:
        """Of the tiles of B."""
        problem = self.problem
        return self.operand_map("b", self.layout.b, problem.n, problem.pitch_b, problem.batches_b)


def parameters(spec: GemmSpec) -> ParameterBlock[AtLaunch]:
    """The kernel's parameter block."""
    operation, schedule = spec.operation, spec.schedule
    trimmed = gemm_layout(operation, schedule).trims_a
    fields: list[Field[AtLaunch]] = [
        *operand_a(trimmed=trimmed),
        tensor_map("b_map", "B, in operand boxes", AtLaunch.b_map),
        *finished(operation, schedule),
        *extents(operation, schedule, trimmed=trimmed),
        *(_batches(operation) if operation.batched else ()),
    ]
    return block(fields)


def _batches(operation: GemmOperation) -> list[Field[AtLaunch]]:
    steps = (step.batch_field(index) for index, step in enumerate(operation.epilogue))
    served = "batches of D in a row that one of"
    return [
        *(field for field in steps if field is not None),
        int32("batches", "of D", lambda at: at.problem.batches),
        int32("a_batches", "of A", lambda at: at.problem.batches_a.count),
        int32("a_repeat", f"{served} A serves", lambda at: at.problem.batches_a.repeat),
        int32("b_batches", "of B", lambda at: at.problem.batches_b.count),
        int32("b_repeat", f"{served} B serves", lambda at: at.problem.batches_b.repeat),
    ]

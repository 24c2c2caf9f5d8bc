"""The parameter block of a product with weights of few bits."""

from __future__ import annotations

from functools import cached_property

from warploom.generator.elements import element
from warploom.generator.families._product import launch
from warploom.generator.families._product.cut import Cut
from warploom.generator.families._product.parameters import extents, finished, operand_a
from warploom.generator.families.mixed_gemm.cut import cut
from warploom.generator.families.mixed_gemm.layout import MixedGemmLayout, mixed_gemm_layout
from warploom.generator.families.mixed_gemm.operation import MixedGemmOperation
from warploom.generator.families.mixed_gemm.problem import MixedGemmProblem
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSchedule, MixedGemmSpec
from warploom.generator.parameters import Field, ParameterBlock, block, int32, pointer
from warploom.generator.slabs import DEPTH, ROWS


class AtLaunch(launch.AtLaunch[MixedGemmOperation, MixedGemmSchedule, MixedGemmProblem]):
    """What a product's parameters are functions of."""

    @cached_property
    def layout(self) -> MixedGemmLayout:
        """Where everything of one block lies."""
        return mixed_gemm_layout(self.operation, self.schedule)

    @cached_property
    def cut(self) -> Cut:
        """How tiles go to clusters."""
        return cut(self.schedule, self.problem, self.device)


def parameters(spec: MixedGemmSpec) -> ParameterBlock[AtLaunch]:
    """The kernel's parameter block."""
    operation, schedule = spec.operation, spec.schedule
    fields: list[Field[AtLaunch]] = [
        *operand_a(trimmed=True),
        pointer("b", "const uint8_t", "W, in slabs"),
        *_channels(operation),
        *finished(operation, schedule),
        *extents(operation, schedule, trimmed=True),
        int32("row_blocks", "of 64 rows of W", lambda at: -(-at.problem.n // ROWS)),
        int32("slabs", "of k, in each of them", lambda at: -(-at.problem.k // DEPTH)),
    ]
    return block(fields)


def _channels(operation: MixedGemmOperation) -> list[Field[AtLaunch]]:
    """Scales and zero points of rows, where they have one for all k."""
    if operation.group:
        return []
    cpp = element(operation.scale).cpp
    fields: list[Field[AtLaunch]] = [pointer("channel_scales", f"const {cpp}", "of rows of W")]
    if operation.weight.has_zeros:
        fields.append(pointer("channel_zeros", "const uint8_t", "likewise"))
    return fields

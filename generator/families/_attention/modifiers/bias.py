"""A bias: a number for each score, or one that several share, that is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from warploom.generator.elements import element
from warploom.generator.families._attention.modifiers.modifier import Modifier, strides
from warploom.generator.parameters import Field, pointer

FORWARD_REGISTERS, WIDE_FORWARD_REGISTERS = 16, 32  # of 16 bits, and of 32
# Found by compiling: of 32 bits beside a mask, of tiles beyond 64 columns.
WIDE_MASKED_REGISTERS = 12
BACKWARD_REGISTERS, WIDE_BACKWARD_REGISTERS, PACKED_REGISTERS = 8, 24, 16
TALL_REGISTERS = 16  # of the backward pass, of more than 96 rows, beside slopes or a cap


class Bias(Modifier):
    """Add a number to each score."""

    name = "bias"
    kind = Literal["none", "fp16", "bf16", "fp32"]
    default = "none"
    doc = "element type of a tensor that is added to the scores; none: there is no such tensor"
    token = "bias_{}"  # noqa: S105 (a name's)
    place = 40
    adds = True
    hides = True

    def parameters(self) -> Sequence[Field[Any]]:
        return [
            pointer(
                "bias", f"const {element(self.value).cpp}", "[batch, head, row, column], by strides"
            ),
            *strides("bias", lambda problem: problem.strides_bias),
        ]

    @property
    def parts(self) -> Sequence[str]:
        return ["bias_fp32" if self.value == "fp32" else "bias_16"]

    @property
    def staged_bytes(self) -> int:
        return 0 if self.value == "fp32" else 2

    def forward_registers(self, schedule: Any) -> int:  # noqa: ANN401
        crowded = self.value == "fp32" and self.operation.masked and self.operation.dim >= 128
        return WIDE_MASKED_REGISTERS if crowded and schedule.kv_tile > 64 else 0

    def forward_score_registers(self) -> int:
        return WIDE_FORWARD_REGISTERS if self.value == "fp32" else FORWARD_REGISTERS

    def backward_registers(self, schedule: Any, q_rows: int, columns: int) -> int:  # noqa: ANN401
        crowded = self.operation.alibi or self.operation.caps
        return TALL_REGISTERS if q_rows > 96 and crowded else 0

    def backward_score_registers(self) -> int:
        registers = WIDE_BACKWARD_REGISTERS if self.value == "fp32" else BACKWARD_REGISTERS
        packed = bool(self.operation.lengths == "packed")
        return registers + packed * PACKED_REGISTERS

    def added(self, score: str) -> str:
        return score  # it is what others are added to

    def added_again(self, score: str) -> str:
        return score

"""softcap * tanh(s / softcap) in the place of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warploom.generator.families._attention.modifiers.modifier import (
    MOST_SCORES_REGISTERS,
    Modifier,
)
from warploom.generator.models import Model
from warploom.generator.parameters import Field, scalar

FORWARD_REGISTERS = 20
# Of the backward pass, without and with overlap; where dq is added in bulk.
SERIAL_REGISTERS, BULK_REGISTERS, OVERLAP_REGISTERS = 8, 12, 16


class Softcap(Modifier):
    """Keep scores within -softcap and softcap."""

    name = "softcap"
    doc = "s = softcap * tanh(s / softcap) before the softmax"
    later = False
    place = 0
    decodes = True
    eight = True
    cost = 0.5
    caps = True

    @classmethod
    def of_model(cls, model: Model) -> Mapping[str, Any]:
        return {cls.name: True} if model.softcap else {}

    def backward_reasons(self) -> Sequence[str | None]:
        if not self.operation.bias_gradient:
            return ()
        return ["bias_gradient with softcap: ds has the slope of the cap by then; leave one out"]

    def parameters(self) -> Sequence[Field[Any]]:
        return [scalar("softcap", "that no score gets beyond")]

    def forward_registers(self, schedule: Any) -> int:  # noqa: ANN401
        return FORWARD_REGISTERS

    def backward_registers(self, schedule: Any, q_rows: int, columns: int) -> int:  # noqa: ANN401
        if schedule.overlap:
            return OVERLAP_REGISTERS
        in_bulk = bool(schedule.accumulate == "bulk")
        return SERIAL_REGISTERS + in_bulk * BULK_REGISTERS

    def most_score_registers(self, schedule: Any) -> int:  # noqa: ANN401
        return MOST_SCORES_REGISTERS - SERIAL_REGISTERS  # nor are these live with all of its own

    def formula(self, score: str) -> str:
        return f"softcap tanh({score} / softcap)"

"""Sinks: a score of each query head that counts in the sums of its rows, with no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from warploom.generator.elements import element
from warploom.generator.families._attention.modifiers.modifier import Modifier
from warploom.generator.launches import Workspace
from warploom.generator.parameters import Field, pointer

# Found by compiling: of the forward pass, of tiles beyond 112 columns, beside a bias and slopes.
SCORES_REGISTERS = 36


class Sinks(Modifier):
    """Count a score of each head, [heads], in the sums of its rows."""

    name = "sinks"
    kind = Literal["none", "same", "fp32"]
    default = "none"
    doc = (
        "element type of attention sinks, a score for each query head that joins the "
        "softmax's denominator but has no value; same: that of q"
    )
    token = "sinks_{}"  # noqa: S105 (a name's)
    place = 10
    decodes = True
    eight = True
    modelled = True
    note = "sinks"
    column = True

    @property
    def cpp(self) -> str:
        """Their type in C++."""
        return element("fp32" if self.value == "fp32" else self.operation.element).cpp

    def parameters(self) -> Sequence[Field[Any]]:
        return [pointer("sinks", f"const {self.cpp}", "[heads]")]

    def gradient_parameters(self) -> Sequence[Field[Any]]:
        return [
            pointer("dsinks", self.cpp, "the gradient of sinks"),
            pointer("sink_sums", "float", "[head, q tile]: what its rows add to dsinks"),
        ]

    def gradient_workspaces(self, q_tiles: int) -> Sequence[Workspace]:
        return [Workspace("sink_sums", 4 * q_tiles)]

    def forward_registers(self, schedule: Any) -> int:  # noqa: ANN401
        operation = self.operation
        crowded = operation.alibi and operation.bias != "none" and operation.lengths != "packed"
        wide = operation.dim >= 128 and schedule.kv_tile > 112
        return SCORES_REGISTERS if crowded and wide else 0

    def extra_score(self, p: str, head: str) -> str:
        return f"float({p}.sinks[{head}])"

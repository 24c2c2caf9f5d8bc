"""softcap * tanh(s / softcap) in the place of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.modifiers.modifier import (
    EXP2_ERROR,
    Fields,
    Modifier,
    Scores,
)

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

TANH_ERROR = 2.0**-10.9  # of tanh.approx, relative (PTX ISA)
_SAMPLE = 30.0


@dataclass(frozen=True, slots=True)
class Softcap(Modifier):
    """Keep scores within -value and value."""

    value: float
    argument: ClassVar[str] = "softcap"
    cap_error: ClassVar[float] = TANH_ERROR
    flex: ClassVar[bool] = True

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        return None if call.softcap is None else cls(call.softcap)

    def fields(self, call: Arguments) -> Fields:
        return {"softcap": True}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        return {"softcap": _SAMPLE} if operation.softcap else {}

    def capped(self, s: torch.Tensor) -> torch.Tensor:
        return torch.tanh(s / self.value) * self.value

    def slope(self, s: torch.Tensor) -> torch.Tensor:
        return 1 - (s / self.value) ** 2  # 1 - tanh^2 of the score before it

    def slope_error(self, slope: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
        tanh = (1 - slope).clamp(min=0) ** 0.5
        tanh_error = TANH_ERROR * tanh + off / self.value
        return (2 * tanh + tanh_error) * tanh_error + EXP2_ERROR

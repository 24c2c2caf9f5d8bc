"""Sinks: a score of each query head that counts in the sums of its rows, with no value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.errors import ProblemError
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier, Scores

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

MASKED_SINK = 4e-7  # of a sink: how far the log-sum-exp of a fully masked row may be from it


@dataclass(frozen=True, slots=True)
class Sinks(Modifier):
    """Count a score of each head, [heads], in the sums of its rows."""

    scores: torch.Tensor
    argument: ClassVar[str] = "sinks"
    has_column: ClassVar[bool] = True

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        return None if call.sinks is None else cls(call.sinks)

    def check(self, call: Arguments, scores: Scores) -> None:
        sinks, heads = self.scores, scores[1]
        fits = sinks.shape == (heads,) and sinks.is_contiguous()
        if not fits or sinks.dtype not in (torch.float32, call.q.dtype):
            raise ProblemError(
                f"sinks {list(sinks.shape)} {sinks.dtype} with strides {list(sinks.stride())}",
                rule=f"must be [{heads}], a score for each head of q, contiguous, of fp32 or the "
                "type of q",
                fix="convert with .float(), and .contiguous()",
            )

    def fields(self, call: Arguments) -> Fields:
        return {"sinks": "same" if self.scores.dtype == call.q.dtype else "fp32"}

    def gradient_fields(self, fields: Fields, wanted: tuple[str, ...]) -> Fields:
        """Sinks have their share in the log-sum-exp, and are read for their own gradient alone."""
        if "sinks" in wanted:
            return fields
        return {name: kind for name, kind in fields.items() if name != "sinks"}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        if operation.sinks == "none":
            return {}
        kind = TORCH[operation.element] if operation.sinks == "same" else torch.float32
        return {"sinks": torch.randn(scores[1], generator=random, device=device).to(kind)}

    def column(self, s: torch.Tensor) -> torch.Tensor:
        one = self.scores.to(s.dtype).reshape(*s.shape[1:3], 1, 1)
        return one.expand(*s.shape[:-1], 1)

    def fill_empty(self, lse: torch.Tensor) -> None:
        lse.copy_(self.scores[:, None].expand(lse.shape))

    def fully_masked(self, lse: torch.Tensor) -> torch.Tensor:
        sink = self.scores.to(lse.dtype)[:, None]
        return (lse - sink).abs() <= MASKED_SINK * sink.abs()

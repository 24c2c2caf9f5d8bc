"""The toy's half with torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.modifiers.modifier import (
    Fields,
    Modifier,
    Rows,
    Scores,
    grouped,
)
from warploom.runtime.families._attention.problem import Arguments


@dataclass(frozen=True, slots=True)
class Recency(Modifier):
    """Add rate * column, by rates [heads]."""

    rates: torch.Tensor
    argument: ClassVar[str] = "recency"

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        rates = getattr(call, "recency", None)
        return None if rates is None else cls(rates)

    def fields(self, call: Arguments) -> Fields:
        return {"recency": True}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        if not operation.recency:
            return {}
        return {"recency": torch.rand(scores[1], generator=random, device=device) / scores[3]}

    def term(
        self, q: torch.Tensor, k: torch.Tensor, chunk: Rows, dtype: torch.dtype
    ) -> torch.Tensor:
        rates = self.rates.to(dtype).expand(q.shape[0], q.shape[1])[chunk.batch]
        return grouped(rates, k)[..., None, None] * torch.arange(k.shape[2], dtype=dtype)

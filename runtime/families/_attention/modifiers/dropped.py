"""Dropout: weights are dropped behind the softmax; ../dropout.py says which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.dropout import Dropout, keep_of
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier, Rows, Scores

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

_SAMPLE = 0.1


@dataclass(frozen=True, slots=True)
class Dropped(Modifier):
    """Drop weights, and divide those that are kept by the probability with which they are."""

    dropout: Dropout
    argument: ClassVar[str] = "dropout_state"

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        if not call.dropout_p or call.dropout_state is None:
            return None
        return cls(Dropout(call.dropout_state, keep_of(call.dropout_p), call.q.shape[1]))

    def fields(self, call: Arguments) -> Fields:
        return {"dropout": True}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        if not operation.dropout:
            return {}
        state = torch.randint(1 << 62, (2,), generator=random, device=device)
        return {"dropout_p": _SAMPLE, "dropout_state": state}

    def of_sequence(self, index: int, rows: int, columns: int) -> Self:
        return replace(self, dropout=replace(self.dropout, batch=index))

    def weighted(self, p: torch.Tensor, chunk: Rows) -> torch.Tensor:
        batches = slice(chunk.batch.start, chunk.batch.start + p.shape[0])
        kept = self.dropout.kept(batches, chunk.rows, p.shape[-1])
        return p * kept.reshape(p.shape) / self.dropout.keep

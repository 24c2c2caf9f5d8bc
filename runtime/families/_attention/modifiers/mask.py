"""A mask: a boolean for each score, or one that several share; those of False do not count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.errors import ProblemError
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.modifiers import score_tensors
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier, Rows, Scores
from warploom.runtime.tensors import normal

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments


@dataclass(frozen=True, slots=True)
class Mask(Modifier):
    """Leave out scores by bool [batch, heads, seq_q, seq_k], or broadcast to it."""

    counts: torch.Tensor
    argument: ClassVar[str] = "mask"

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        return None if call.mask is None else cls(call.mask)

    def check(self, call: Arguments, scores: Scores) -> None:
        mask = self.counts
        score_tensors.check_broadcast("mask", mask, scores)
        if mask.dtype != torch.bool:
            raise ProblemError(
                f"mask of {mask.dtype}",
                rule="must be of torch.bool: True where a score counts",
                fix="pass what is added to scores as bias=",
            )

    def fields(self, call: Arguments) -> Fields:
        return {"masked": True}

    def copies(self, call: Arguments) -> tuple[str, ...]:
        columns = score_tensors.columns_of(call)
        return () if score_tensors.readable(self.counts, columns) else ("mask",)

    def problem(self, call: Arguments, copies: tuple[str, ...]) -> Fields:
        columns, copied = score_tensors.columns_of(call), "mask" in copies
        return {"strides_mask": score_tensors.strides(self.counts, columns, copied=copied)}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        if not operation.masked:
            return {}
        drawn = normal((1, 1, *scores[2:]), random, device)
        return {"mask": score_tensors.room_for(scores[3], drawn > -1)}

    def of_sequence(self, index: int, rows: int, columns: int) -> Self:
        own = score_tensors.batch_of(self.counts, index)
        return replace(self, counts=own[:, :, :rows, :columns])

    def shown(self, q: torch.Tensor, k: torch.Tensor, chunk: Rows) -> torch.Tensor:
        return score_tensors.of_chunk(self.counts, q, k, chunk)

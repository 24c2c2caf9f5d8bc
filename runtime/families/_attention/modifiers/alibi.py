"""ALiBi: scores fall with the distance from the diagonal, by a slope of each query head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.errors import ProblemError
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.modifiers.modifier import (
    Fields,
    Modifier,
    Rows,
    Scores,
    grouped,
)

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments


@dataclass(frozen=True, slots=True)
class Alibi(Modifier):
    """Add -slope abs(row + seq_k - seq_q - column), by slopes [heads] or [batch, heads]."""

    slopes: torch.Tensor
    argument: ClassVar[str] = "alibi_slopes"

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        return None if call.alibi_slopes is None else cls(call.alibi_slopes)

    def check(self, call: Arguments, scores: Scores) -> None:
        slopes, (batch, heads, _, _) = self.slopes, scores
        fits = slopes.shape in ((heads,), (batch, heads)) and slopes.is_contiguous()
        if not fits or slopes.dtype != torch.float32:
            raise ProblemError(
                f"alibi_slopes {list(slopes.shape)} {slopes.dtype} with strides "
                f"{list(slopes.stride())}",
                rule=f"must be [{heads}] or [{batch}, {heads}], contiguous, of torch.float32",
                fix="convert with .float(), and .contiguous()",
            )
        if slopes.requires_grad:
            raise ProblemError(
                "alibi_slopes that require grad",
                rule="slopes have no gradient",
                fix="detach them, or pass what they add to scores as bias=",
            )

    def fields(self, call: Arguments) -> Fields:
        return {"alibi": True}

    def problem(self, call: Arguments, copies: tuple[str, ...]) -> Fields:
        return {"alibi_batch": self.slopes.shape[1]} if self.slopes.dim() == 2 else {}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        if not operation.alibi:
            return {}
        heads = scores[1]
        steps = torch.arange(1, heads + 1, device=device)
        return {"alibi_slopes": torch.exp2(-8 * steps / max(1, heads))}

    def of_sequence(self, index: int, rows: int, columns: int) -> Self:
        slopes = self.slopes
        one = slopes.dim() == 1 or slopes.shape[0] == 1
        return self if one else replace(self, slopes=slopes[index : index + 1])

    def term(
        self, q: torch.Tensor, k: torch.Tensor, chunk: Rows, dtype: torch.dtype
    ) -> torch.Tensor:
        seq_q, seq_k = q.shape[2], k.shape[2]
        row = torch.arange(chunk.rows.start, chunk.rows.stop, device=q.device)[:, None]
        distance = (row + seq_k - seq_q - torch.arange(seq_k, device=q.device)).abs().to(dtype)
        whole = self.slopes.to(dtype).expand(q.shape[0], q.shape[1])[chunk.batch]
        return -grouped(whole, k)[..., None, None] * distance

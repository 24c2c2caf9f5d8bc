"""Sinks: a score of each query head that counts in the sums of its rows, with no value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.errors import ProblemError
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.elements import TORCH, unit_roundoff
from warploom.runtime.families._attention.modifiers.modifier import (
    EXP2_ERROR,
    FLOAT_ROUNDOFF,
    Fields,
    Modifier,
    RowSums,
    Scores,
)
from warploom.runtime.tensors import normal

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

MASKED_SINK = 4e-7  # of a sink: how far the log-sum-exp of a fully masked row may be from it


@dataclass(frozen=True, slots=True)
class Sinks(Modifier):
    """Count a score of each head, [heads], in the sums of its rows."""

    scores: torch.Tensor
    argument: ClassVar[str] = "sinks"
    has_column: ClassVar[bool] = True
    gradient: ClassVar[str] = "dsinks"

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        return None if call.sinks is None else cls(call.sinks)

    def check(self, call: Arguments, scores: Scores) -> None:
        sinks, heads = self.scores, scores[1]
        fits = sinks.shape == (heads,) and sinks.is_contiguous()
        types = [torch.float32]
        if call.q.dtype.itemsize > 1:  # numbers of 8 bits are too coarse for a score
            types.append(call.q.dtype)
        if not fits or sinks.dtype not in types:
            raise ProblemError(
                f"sinks {list(sinks.shape)} {sinks.dtype} with strides {list(sinks.stride())}",
                rule=f"must be [{heads}], contiguous, of {' or '.join(map(str, types))}",
                fix="pass a score for each head of q: convert with .float(), and .contiguous()",
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
        return {"sinks": normal((scores[1],), random, device).to(kind)}

    def of_heads(self, heads: slice) -> Self:
        return replace(self, scores=self.scores[heads])

    def column(self, s: torch.Tensor) -> torch.Tensor:
        one = self.scores.to(s.dtype).reshape(*s.shape[1:3], 1, 1)
        return one.expand(*s.shape[:-1], 1)

    def fill_empty(self, lse: torch.Tensor) -> None:
        lse.copy_(self.scores[:, None].expand(lse.shape))

    def fully_masked(self, lse: torch.Tensor) -> torch.Tensor:
        sink = self.scores.to(lse.dtype)[:, None]
        return (lse - sink).abs() <= MASKED_SINK * sink.abs()

    @classmethod
    def is_differentiated(cls, operation: Operation) -> bool:
        return bool(operation.sinks != "none")

    def column_gradient(self, rows: RowSums) -> torch.Tensor:
        """lse has the share of a sink: dsinks = -sum(exp(sinks - lse) delta), by heads."""
        return -(self._share(rows) * rows.delta).sum((0, 2))

    def column_gradient_bound(self, rows: RowSums) -> torch.Tensor:
        """Each row's share has the errors of its exponent and of delta; their sums are fp32."""
        sinks, weight, delta = self.scores, self._share(rows), rows.delta.abs()
        largest = sinks.double().nan_to_num(neginf=0.0).abs()[:, None]
        exponent = largest + rows.lse.abs().nan_to_num(posinf=0.0)
        off = weight * FLOAT_ROUNDOFF * (rows.dim + 4) * rows.mass
        off = off + torch.expm1(EXP2_ERROR + 4 * FLOAT_ROUNDOFF * exponent) * weight * delta
        count = rows.lse.shape[0] * rows.lse.shape[2]
        off = off + FLOAT_ROUNDOFF * (64 + count / 64) * weight * delta
        total = off.sum((0, 2))
        info, unit = torch.finfo(sinks.dtype), unit_roundoff(sinks.dtype)
        denormal = info.smallest_normal * info.eps / 2  # rounding below the normal numbers
        return total + unit * (self.column_gradient(rows).abs() + total) + denormal

    def _share(self, rows: RowSums) -> torch.Tensor:
        """What of each row's sum the sink has, [batch, heads, rows]."""
        share = (self.scores.to(rows.lse.dtype)[:, None] - rows.lse).exp()
        return share.masked_fill(rows.lse == -torch.inf, 0)

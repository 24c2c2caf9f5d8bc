"""What every modifier of attention declares: an option that changes scores, weights or their sums.

A class is the option, an instance its values in one call. Everything has a default that changes
nothing, so that a modifier states only what it does. Scores of a chunk are
[batch, kv_heads, heads of one, rows, seq_k].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.generator.families._attention.operation import Operation

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

Scores = tuple[int, int, int, int]  # batch, heads, rows, columns
Fields = Mapping[str, Any]  # of an operation, by name

FLOAT_ROUNDOFF = 2.0**-24  # of one fp32 operation
EXP2_ERROR = 2.0**-21  # of ex2.approx and lg2.approx, with the rounding of their arguments


@dataclass(frozen=True, slots=True)
class Rows:
    """One chunk of the scores of whole sequences: some of the batch, a range of the rows."""

    batch: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class RowSums:
    """What the gradient of a column follows from, of each row: [batch, heads, rows] each.

    lse    the log-sum-exp
    delta  rowsum(dout out) - dlse; 0 where lse is -inf
    mass   the sum of the magnitudes of what delta is the sum of
    dim    how many products of dout and out that are
    """

    lse: torch.Tensor
    delta: torch.Tensor
    mass: torch.Tensor
    dim: int


def grouped(tensor: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Tell apart the query heads of each kv head: [batch, kv_heads, heads of one, ..]."""
    heads, kv_heads = tensor.shape[1], k.shape[1]
    return tensor.reshape(tensor.shape[0], kv_heads, heads // kv_heads, *tensor.shape[2:])


class Modifier:
    """An option of attention.

    argument     the argument of a call that turns it on
    cap_error    what it adds to the relative error of a score
    has_column   rows have a sum without a key, too
    gradient     what kernels call where they write what the gradient of its argument follows from:
                 of a column that gradient, else that of scores; "" where it has none
    flex         a baseline computes it: `capped`, in torch's flex_attention
    rounds       scores are rounded to fp32 behind its term, in float64 too
    """

    argument: ClassVar[str]
    cap_error: ClassVar[float] = 0.0
    rounds: ClassVar[bool] = False
    has_column: ClassVar[bool] = False
    gradient: ClassVar[str] = ""
    flex: ClassVar[bool] = False

    # ---- A call of it ----------------------------------------------------------------------------

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        """Its values in a call; None where the call is without it."""
        raise NotImplementedError

    def check(self, call: Arguments, scores: Scores) -> None:
        """Raise ProblemError for values that a call of these extents does not take."""

    def fields(self, call: Arguments) -> Fields:
        """The fields of the operation that computes the call."""
        return {}

    def gradient_fields(self, fields: Fields, wanted: tuple[str, ...]) -> Fields:
        """The fields of the operation of gradients, of those of a call.

        Args:
            fields: those of the call, of all its modifiers.
            wanted: the tensors beside q, k and v whose gradients are wanted, by their arguments.
        """
        return fields

    def copies(self, call: Arguments) -> tuple[str, ...]:
        """The arguments that kernels cannot read where they lie."""
        return ()

    def problem(self, call: Arguments, copies: tuple[str, ...]) -> Fields:
        """The fields of a kernel's problem, where these arguments are copied."""
        return {}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        """The keywords of calls of an operation, drawn at random; none where it is without it."""
        return {}

    # ---- What it computes ------------------------------------------------------------------------

    def of_sequence(self, index: int, rows: int, columns: int) -> Self:
        """Its values for one sequence of several of varying lengths."""
        return self

    def of_heads(self, heads: slice) -> Self:
        """Its values for some of the query heads."""
        return self

    def capped(self, s: torch.Tensor) -> torch.Tensor:
        """Scores, before anything is added to them."""
        return s

    def slope(self, s: torch.Tensor) -> torch.Tensor | None:
        """The derivative of `capped` where it returned s; None: 1 everywhere."""
        return None

    def slope_error(self, slope: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
        """How far a kernel's slope may be off, for scores that are `off` before `capped`."""
        raise NotImplementedError

    def term(
        self, q: torch.Tensor, k: torch.Tensor, chunk: Rows, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What is added to the scores of a chunk, in `dtype`; None: nothing."""
        return None

    def shown(self, q: torch.Tensor, k: torch.Tensor, chunk: Rows) -> torch.Tensor | None:
        """Which scores of a chunk count; None: all."""
        return None

    def column(self, s: torch.Tensor) -> torch.Tensor | None:
        """A score of each row that counts in its sum with no value, [.., rows, 1]; None: none."""
        return None

    def fully_masked(self, lse: torch.Tensor) -> torch.Tensor | None:
        """Rows that are fully masked by their log-sum-exp [batch, heads, rows], beside -inf."""
        return None

    def fill_empty(self, lse: torch.Tensor) -> None:
        """Write the log-sum-exp [.., heads, rows] of rows without a key, which is -inf."""

    def weighted(self, p: torch.Tensor, chunk: Rows) -> torch.Tensor:
        """Weights of a chunk behind the softmax."""
        return p

    # ---- The gradient of its argument ------------------------------------------------------------

    @classmethod
    def is_differentiated(cls, operation: Operation) -> bool:
        """Whether an operation of gradients has that of its argument."""
        return False

    def column_gradient(self, rows: RowSums) -> torch.Tensor:
        """The gradient of what `column` is made of, as wide as `rows`."""
        raise NotImplementedError

    def column_gradient_bound(self, rows: RowSums) -> torch.Tensor:
        """How far a kernel's may be from that, for float64 rows."""
        raise NotImplementedError

    def gradient_of(self, written: torch.Tensor) -> torch.Tensor:
        """The gradient of its argument, of what kernels wrote."""
        return written

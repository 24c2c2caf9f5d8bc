"""Operands of an attention with an option, and what is right of its results.

A result is held against float64 by the error of the plain torch expression in the type of q; of
whoever draws a dropout mask of their own, which cannot be repeated, a mean is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

import warploom
from benchmarks.peers._attention import Operands, operands
from benchmarks.peers._options_problem import LISTED, Option, Pattern, pattern
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.dropout import Dropout, keep_of
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers import (
    Alibi,
    Bias,
    Dropped,
    Mask,
    Modifier,
    Sinks,
)
from warploom.runtime.families._attention.modifiers.modifier import Rows

Tensors = dict[str, torch.Tensor]
_CHECKED_ROWS = 256  # of the last batch, at its end
_MEAN_OFF = 0.01  # how far off a mean may be that is 1 for the right share of dropped weights
_PRESENT = 0.75  # of the scores of a mask


class Shared:
    """What all sets of operands of a cell have in common: the tensors that its option reads."""

    def __init__(self, problem: Option, device: str) -> None:
        self.problem, self.device = problem, device
        self.draws = torch.Generator(device).manual_seed(0)
        self.pattern: Pattern | None = pattern(problem, device)
        self.read = self._read()

    @cached_property
    def told(self) -> dict[str, Any]:
        """What Warploom is told beside tensors that may have gradients, and a state."""
        found: dict[str, Any] = {**self.problem.attention.keywords, **self.read}
        found.pop(self.problem.differentiated, None)
        if self.problem.dropout_p:
            found["dropout_p"] = self.problem.dropout_p
        if self.pattern is not None:
            found["block_mask"] = warploom.block_mask(self.blocks)
        return found

    @cached_property
    def blocks(self) -> Any:  # noqa: ANN401 (torch's BlockMask)
        """torch's mask of blocks of all that hides scores; None where nothing does."""
        from torch.nn.attention.flex_attention import create_block_mask

        one, mask, shown = self.problem.attention, self.read.get("mask"), self.pattern
        batch = None if mask is None or mask.shape[0] == 1 else one.batch

        def mask_mod(
            b: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
        ) -> torch.Tensor:
            if shown is not None:
                return shown(row, column)
            if mask is not None:
                return mask[b, 0, 0, column] if batch else mask[0, 0, row, column]
            band = column <= row
            return band & (row - column <= one.window) if one.window is not None else band

        if shown is None and mask is None and not one.causal:
            return None
        return create_block_mask(mask_mod, batch, None, one.seq, one.seq, self.device)

    @cached_property
    def biases(self) -> torch.Tensor:
        """What ALiBi and a causal mask add to scores, [1, heads, seq, seq], in the type of q."""
        one = self.problem.attention
        place = torch.arange(one.seq, device=self.device)
        away = (place[:, None] - place).abs().float()
        found = -self.read["alibi_slopes"][:, None, None] * away
        if one.causal:
            found.masked_fill_(place > place[:, None], -math.inf)
        return found[None].bfloat16()

    def _read(self) -> Tensors:
        one, kind = self.problem.attention, self.problem.kind
        device, draws = self.device, self.draws
        if kind == "mask_of_pairs":
            drawn = torch.rand(one.seq, one.seq, generator=draws, device=device)
            return {"mask": (drawn < _PRESENT)[None, None]}
        if kind == "mask_of_keys":
            lengths = torch.linspace(one.seq, one.seq // 2, one.batch, device=device).int()
            present = torch.arange(one.seq, device=device) < lengths[:, None]
            return {"mask": present[:, None, None]}
        if kind in ("bias", "bias_gradient"):
            shape = (1, one.heads, one.seq, one.seq)
            return {"bias": torch.randn(shape, generator=draws, device=device).bfloat16()}
        if kind == "alibi":
            steps = torch.arange(1, one.heads + 1, device=device)
            return {"alibi_slopes": 2.0 ** (-8 * steps / one.heads)}
        if kind == "sinks":
            return {"sinks": torch.randn(one.heads, generator=draws, device=device).bfloat16()}
        return {}


class Given:
    """One set of operands, `like` another where there is one, and the gradient of its result."""

    def __init__(self, shared: Shared, like: Given | None = None) -> None:
        self.problem, self.shared = shared.problem, shared
        self.one: Operands = (
            operands(self.problem.attention, shared.device) if like is None else like.one
        )
        self.dout: torch.Tensor = torch.randn_like(self.one.q) if like is None else like.dout

    @property
    def tensors(self) -> Tensors:
        """q, k, v, and what else has a gradient."""
        name = self.problem.differentiated
        more = {name: self.shared.read[name]} if name else {}
        return {"q": self.one.q, "k": self.one.k, "v": self.one.v, **more}

    def leaves(self) -> Tensors:
        """Fresh ones of which gradients are wanted, on the same memory."""
        return {name: one.detach().requires_grad_() for name, one in self.tensors.items()}

    # ---- What is right ---------------------------------------------------------------------------

    def share(
        self, found: Sequence[torch.Tensor], *, both: bool, state: torch.Tensor | None
    ) -> float:
        """The largest error of results as a share of what is allowed; NaN is infinite.

        Of the output, the last rows of the last batch; of gradients, those of its first group of
        heads, and of what batches share the sums over them. Allowed is twice the largest error of
        the plain expression in the type of q, plus one ulp.
        """
        if not all(one.isfinite().all() for one in found):
            return math.inf
        group = self._group
        parts = [found[0][-1:, :, -_CHECKED_ROWS:]]
        if both:
            dq, dk, dv, *more = found
            parts = [dq[-1:, :group], dk[-1:, :1], dv[-1:, :1]]
            parts += [one[:, :group] if one.dim() == 4 else one[:group] for one in more]
        right, plain = (
            self._gradients(state, dtype) if both else self._rows(state, dtype)
            for dtype in (torch.float64, self.one.q.dtype)
        )
        shares = []
        for part, exact, rounded in zip(parts, right, plain, strict=True):
            allowed = 2 * float((rounded.double() - exact).abs().max())
            allowed += reference.ulp(part.dtype, float(exact.abs().max()))
            shares.append(float((part.double() - exact).abs().max()) / allowed)
        return max(shares)

    @staticmethod
    def mean_share(mean: torch.Tensor) -> float:
        """How far off a mean is that should be 1, as a share of what is allowed."""
        off = abs(float(mean) - 1) / _MEAN_OFF
        return math.inf if math.isnan(off) else off

    @property
    def _group(self) -> int:
        return self.problem.attention.heads // self.problem.attention.kv_heads

    def _rows(self, state: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
        one, last = self.problem.attention, self.problem.attention.batch - 1
        rows = slice(max(0, one.seq - _CHECKED_ROWS), one.seq)
        q, k, v = self.one.q[last:, :, rows], self.one.k[last:], self.one.v[last:]
        function = self._function(q, self.shared.read, last, rows, state)
        compute = reference.exact if dtype == torch.float64 else reference.plain
        return [compute(q, k, v, function)[0]]

    def _gradients(self, state: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
        """By autograd through the plain expression in a type, whose every step is rounded to it."""
        one, name = self.problem.attention, self.problem.differentiated
        total: torch.Tensor | None = None
        found: list[torch.Tensor] = []
        for batch in range(0 if name else one.batch - 1, one.batch):
            leaves = {
                key: self._part(key, tensor, batch).detach().to(dtype).requires_grad_()
                for key, tensor in self.tensors.items()
            }
            q, k, v = leaves["q"], leaves["k"], leaves["v"]
            read = {**self.shared.read, **{key: leaves[key] for key in (name,) if key}}
            every = slice(0, one.seq)
            function = self._function(q, read, batch, every, state)
            with torch.enable_grad():
                out, _ = reference.plain_rows(q, k, v, function, Rows(slice(0, 1), every))
            dout = self.dout[batch : batch + 1, : self._group].to(dtype)
            found = list(torch.autograd.grad(out, list(leaves.values()), dout))
            if name:
                wide = found[3].to(torch.promote_types(dtype, torch.float32))
                total = wide if total is None else total + wide
        return found if total is None else [*found[:3], total.to(dtype)]

    def _part(self, name: str, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """What the first group of heads of a batch has of a tensor."""
        if name in ("k", "v"):
            return tensor[batch : batch + 1, :1]
        if tensor.dim() == 1:
            return tensor[: self._group]
        at = batch if tensor.shape[0] > 1 else 0
        return tensor[at : at + 1, : self._group]

    def _function(
        self,
        q: torch.Tensor,
        read: Tensors,
        batch: int,
        rows: slice,
        state: torch.Tensor | None,
    ) -> Function:
        """What is computed of some rows of the first heads of a batch, as many as q has."""
        heads, seq = q.shape[1], self.problem.attention.seq
        slopes, mask = read.get("alibi_slopes"), self._of_scores(read.get("mask"), batch, rows)
        if self.shared.pattern is not None:
            column = torch.arange(seq, device=q.device)
            mask = self.shared.pattern(column[rows, None], column)[None, None]
        sinks, bias = read.get("sinks"), self._of_scores(read.get("bias"), batch, rows, heads)
        modifiers: list[Modifier] = [
            *([] if sinks is None else [Sinks(sinks[:heads])]),
            *([] if slopes is None else [Alibi(slopes[None, :heads])]),
            *([] if bias is None else [Bias(bias)]),
            *([] if mask is None else [Mask(mask)]),
        ]
        if state is not None:
            first = batch * self.problem.attention.heads // heads  # of batches of so many heads
            keep = keep_of(LISTED["dropout_p"])
            modifiers.append(Dropped(Dropout(state, keep, heads, first, rows.start)))
        return Function(q.shape[3] ** -0.5, self._band, tuple(modifiers))

    @property
    def _band(self) -> Band:
        one = self.problem.attention
        if one.band is not None:
            return Band(*one.band, bottom_right=True)
        return Band(right=0, bottom_right=True) if one.causal else Band()

    @staticmethod
    def _of_scores(
        tensor: torch.Tensor | None, batch: int, rows: slice, heads: int = 1
    ) -> torch.Tensor | None:
        if tensor is None:
            return None
        at = batch if tensor.shape[0] > 1 else 0
        one = tensor[at : at + 1, :heads]
        return one[:, :, rows] if one.shape[2] > 1 else one

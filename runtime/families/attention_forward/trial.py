"""Random operands of an attention, calls of its kernels, and their check against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families._attention.samples import AttentionData
from warploom.runtime.families.attention_forward import api
from warploom.runtime.measure import Call
from warploom.runtime.trial import sets_for

CHECKED_ROWS = 128  # at the beginning and at the end of a sequence


@dataclass(frozen=True, slots=True)
class Operands:
    """One set of buffers: q, k, v, the output, and the offsets of packed sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lengths: dict[str, Any]


class AttentionTrial(AttentionData):
    """An attention on normal random data that lies as a model's does, [batch, seq, heads, dim]."""

    def __init__(
        self, operation: AttentionOperation, shape: AttentionShape, device: str, seed: int
    ) -> None:
        super().__init__(operation, shape, device, seed)
        self.operation = operation
        one = self._operands()
        moved = sum(t.numel() * t.element_size() for t in (one.q, one.k, one.v, one.out))
        more = sets_for(moved, device) - 1
        self.sets = [one, *(self._operands() for _ in range(more))]

    def calls(self, spec: KernelSpec) -> list[Call]:
        """One call of `spec` for each set of operands."""
        keywords = {**self.keywords, "spec": spec}
        return [
            partial(api.attention, one.q, one.k, one.v, out=one.out, **one.lengths, **keywords)
            for one in self.sets
        ]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound.

        The first and last rows of a sequence are held against float64, all for being finite.
        """
        one = self.sets[0]
        one.out.fill_(math.nan)
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        one = self.sets[0]
        worst = 0.0 if one.out.isfinite().all() else math.inf
        for rows, exact, bound in self._expected:
            share = (
                self.sequence(one.out, self.shape.seq_q)[:, :, rows].double() - exact
            ).abs() / bound
            worst = max(worst, float(share.nan_to_num(nan=math.inf).max()))
        return worst

    @property
    def results(self) -> list[torch.Tensor]:
        """The output of the first set."""
        return [self.sets[0].out]

    @cached_property
    def _expected(self) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of the longest sequence: rows, what is right there, and how far off it may be."""
        one = self.sets[0]
        q = self.sequence(one.q, self.shape.seq_q)
        k, v = (self.sequence(tensor, self.shape.seq_k) for tensor in (one.k, one.v))
        last = slice(max(0, q.shape[2] - CHECKED_ROWS), q.shape[2])
        checked = [(last, k, v)]
        if self.shape.seq_q == self.shape.seq_k and self.operation.mask != "none":
            first = slice(0, min(CHECKED_ROWS, q.shape[2]))
            checked.append((first, k[:, :, first], v[:, :, first]))
        found = []
        for rows, keys, values in checked:
            keywords = dict(self.keywords)
            if "causal" in keywords:
                keywords["causal"] = "bottom_right"
            if "block_mask" in keywords:
                every = slice(None)
                keywords["block_mask"] = keywords["block_mask"].part(slice(-1, None), rows, every)
            call = Arguments(q[:, :, rows], keys, values, **keywords)
            masked = band(call, extents(call))
            exact, _ = reference.of_call(call, masked, reference.exact)
            bound, _ = reference.of_call(call, masked, reference.bound)
            found.append((rows, exact, bound))
        return found

    def _operands(self) -> Operands:
        q, k, v = self.queries(), self.keys(), self.values()
        out = q.new_full((*q.shape[:-1], v.shape[-1]), math.nan)
        return Operands(q, k, v, out, self.lengths())

"""Random operands of an attention, calls of its kernels, and their check against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.model.shapes import AttentionShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import api
from warploom.runtime import attention_reference as reference
from warploom.runtime.attention_mask import band
from warploom.runtime.attention_problem import Call as Arguments
from warploom.runtime.attention_problem import extents
from warploom.runtime.elements import TORCH
from warploom.runtime.measure import Call
from warploom.tuning.trial import sets_for

SOFTCAP = 30.0
_CHECKED_ROWS = 128  # at the beginning and at the end of a sequence


@dataclass(frozen=True, slots=True)
class Operands:
    """One set of buffers: q, k, v, the output, and the offsets of packed sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lengths: dict[str, Any]


class AttentionTrial:
    """An attention on normal random data that lies as a model's does, [batch, seq, heads, dim]."""

    def __init__(
        self, operation: AttentionOperation, shape: AttentionShape, device: str, seed: int
    ) -> None:
        self.operation, self.shape, self.device = operation, shape, device
        self._random = torch.Generator(device).manual_seed(seed)
        one = self._operands()
        moved = sum(t.numel() * t.element_size() for t in (one.q, one.k, one.v, one.out))
        more = sets_for(moved, device) - 1
        self.sets = [one, *(self._operands() for _ in range(more))]

    @property
    def keywords(self) -> dict[str, Any]:
        """What the calls are given beside tensors."""
        found: dict[str, Any] = {}
        if self.operation.mask == "causal":
            equal = self.shape.seq_q == self.shape.seq_k
            found["causal"] = True if equal else "bottom_right"
        elif self.operation.mask == "window":
            found["window"] = (max(0, self.shape.window - 1), 0)
        if self.operation.softcap:
            found["softcap"] = SOFTCAP
        return found

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
        if not one.out.isfinite().all():
            return math.inf
        worst = 0.0
        for rows, exact, bound in self._expected:
            share = (self._sequence(one.out)[:, :, rows].double() - exact).abs() / bound
            worst = max(worst, float(share.nan_to_num(nan=math.inf).max()))
        return worst

    @cached_property
    def _expected(self) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of the longest sequence: rows, what is right there, and how far off it may be."""
        one = self.sets[0]
        q, k, v = (self._sequence(tensor) for tensor in (one.q, one.k, one.v))
        last = slice(max(0, q.shape[2] - _CHECKED_ROWS), q.shape[2])
        checked = [(last, k, v)]
        if self.shape.seq_q == self.shape.seq_k and self.operation.mask != "none":
            first = slice(0, min(_CHECKED_ROWS, q.shape[2]))
            checked.append((first, k[:, :, first], v[:, :, first]))
        found = []
        for rows, keys, values in checked:
            keywords = dict(self.keywords)
            if "causal" in keywords:
                keywords["causal"] = "bottom_right"
            call = Arguments(q[:, :, rows], keys, values, **keywords)
            masked = band(call, extents(call))
            exact, _ = reference.of_call(call, masked, reference.exact)
            bound, _ = reference.of_call(call, masked, reference.bound)
            found.append((rows, exact, bound))
        return found

    def _sequence(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last batch, or the longest packed sequence, the first: [1, heads, seq, dim]."""
        if self.operation.lengths == "packed":
            return tensor[: self.shape.seq_q].transpose(0, 1)[None]
        return tensor[-1:]

    def _operands(self) -> Operands:
        shape = self.shape
        q = self._tensor(shape.heads, shape.seq_q, shape.total_q)
        k = self._tensor(shape.kv_heads, shape.seq_k, shape.total_k)
        v = self._tensor(shape.kv_heads, shape.seq_k, shape.total_k)
        return Operands(q, k, v, torch.full_like(q, math.nan), self._lengths())

    def _tensor(self, heads: int, seq: int, total: int) -> torch.Tensor:
        dim = self.shape.dim
        packed = self.operation.lengths == "packed"
        wanted = (total, heads, dim) if packed else (self.shape.batch, seq, heads, dim)
        drawn = torch.randn(wanted, generator=self._random, device=self.device)
        found = drawn.to(TORCH[self.operation.element])
        return found if packed else found.transpose(1, 2)

    def _lengths(self) -> dict[str, Any]:
        """Offsets of packed sequences: the first is the longest, the rest share what is left."""
        shape = self.shape
        if self.operation.lengths != "packed":
            return {}
        found: dict[str, Any] = {"max_seqlen_q": shape.seq_q, "max_seqlen_k": shape.seq_k}
        for name, longest, total in (
            ("cu_seqlens_q", shape.seq_q, shape.total_q),
            ("cu_seqlens_k", shape.seq_k, shape.total_k),
        ):
            rest = (
                longest + (total - longest) * index // (shape.batch - 1)
                for index in range(1, shape.batch)
            )
            ends = [0, longest, *rest]
            found[name] = torch.tensor(ends, dtype=torch.int32, device=self.device)
        if found["cu_seqlens_q"].tolist() == found["cu_seqlens_k"].tolist():
            found["cu_seqlens_k"] = found["cu_seqlens_q"]
        return found

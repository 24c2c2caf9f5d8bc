"""Random operands of decoding, as a serving model's lie: each sequence has all keys it may have."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families.attention_decode import DecodeOperation, DecodeShape
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention.modifiers import MODIFIERS
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.tensors import normal
from warploom.runtime.trial import wrong

WINDOW = 1024  # keys to the left of a row
_SPREAD = {"e4m3": 4.0, "int8": 40.0}  # of numbers in caches of 8 bits: they fill their range


def draw(
    operation: DecodeOperation,
    shape: DecodeShape,
    device: str,
    random: torch.Generator | None,
) -> AttentionDecodeCall:
    """A call with normal operands and an output full of what no right result is full of.

    q lies as [batch, seq_q, heads, dim]; pages are those of the cache in random order. On `meta`,
    only shapes.
    """
    draws = _Draws(operation, shape, device, random)
    packed = operation.queries == "packed"
    rows = (shape.batch * shape.seq_q,) if packed else (shape.batch, shape.seq_q)
    q = draws.normal(*rows, shape.heads, operation.dim).to(TORCH[operation.element])
    q = q if packed else q.transpose(1, 2)
    k, v = draws.cache(), draws.cache()
    call = AttentionDecodeCall(q, k, v, **draws.lists())
    call.causal = operation.mask != "none"
    if operation.mask == "window":
        call.window = (min(WINDOW, max(0, shape.seq_k - 2)), None)
    scores = (shape.batch, shape.heads, shape.seq_q, shape.seq_k)
    for kind in MODIFIERS:
        if kind.argument in call.declaration.names:
            for name, value in kind.sample(operation, scores, device, random).items():  # type: ignore[arg-type]
                setattr(call, name, value)
    if operation.scales != "none":
        call.scale_k, call.scale_v = draws.scales(k), draws.scales(k)
    call.batch_invariant = operation.batch_invariant
    call.out = wrong(torch.empty_like(q))
    return call


class _Draws:
    """Tensors of one call."""

    def __init__(
        self,
        operation: DecodeOperation,
        shape: DecodeShape,
        device: str,
        random: torch.Generator | None,
    ) -> None:
        self.operation, self.shape, self.device, self.random = operation, shape, device, random

    def normal(self, *extents: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return normal(extents, self.random, self.device, dtype)

    def cache(self) -> torch.Tensor:
        """A cache of keys or values, of which there is no copy of a wider type."""
        operation, shape = self.operation, self.shape
        extents: tuple[int, ...] = (shape.batch, shape.kv_heads, shape.seq_k, operation.dim)
        if operation.page:
            extents = (shape.batch * self._columns, shape.kv_heads, operation.page, operation.dim)
        elif operation.keys == "packed":
            extents = (shape.batch * shape.seq_k, shape.kv_heads, operation.dim)
        found = self.normal(*extents, dtype=TORCH[operation.element])
        if operation.cache == "same":
            return found
        found *= _SPREAD[operation.cache]
        if operation.cache == "int8":
            found.clamp_(-127, 127)
        return found.to(TORCH[operation.cache])

    def scales(self, k: torch.Tensor) -> torch.Tensor:
        """Positive scales that bring a cache's numbers back to about 1."""
        extents = k.shape[:-1] if self.operation.scales == "token" else (self.shape.kv_heads,)
        drawn = torch.rand(extents, generator=self.random, device=self.device) + 0.5
        return drawn / _SPREAD.get(self.operation.cache, 1.0)

    def lists(self) -> dict[str, Any]:
        """Lengths, offsets and a table, as far as the operation has them."""
        operation, shape = self.operation, self.shape
        found: dict[str, Any] = {}
        if operation.page:
            pages = shape.batch * self._columns
            order = torch.randperm(pages, generator=self.random, device=self.device)
            found["page_table"] = order.reshape(shape.batch, self._columns).int()
            found["max_seqlen_k"] = shape.seq_k
        if operation.lengths:
            found["cache_seqlens"] = self._filled(shape.seq_k)
        if operation.starts:
            found["cache_leftpad"] = self._filled(shape.seq_k // 8)
        if operation.keys == "packed":
            found["cu_seqlens_k"] = self._ends(shape.seq_k)
            found["max_seqlen_k"] = shape.seq_k
        if operation.queries == "packed":
            found["cu_seqlens_q"] = self._ends(shape.seq_q)
            found["max_seqlen_q"] = shape.seq_q
        return found

    @property
    def _columns(self) -> int:
        return -(-self.shape.seq_k // self.operation.page)

    def _filled(self, value: int) -> torch.Tensor:
        return torch.full((self.shape.batch,), value, dtype=torch.int32, device=self.device)

    def _ends(self, length: int) -> torch.Tensor:
        last = self.shape.batch * length
        return torch.arange(0, last + 1, max(1, length), dtype=torch.int32, device=self.device)

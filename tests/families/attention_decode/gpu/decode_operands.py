"""Operands of decode attention: views into rooms of 0xff bytes, lengths, tables and scales."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from decode_cases import Shape
from rooms import Guarded

from warploom.generator.families.attention_decode import DecodeOperation
from warploom.runtime.elements import TORCH

DEVICE = "cuda"
ROOM = 32  # bytes on each side of a row
SPARE = 3  # pages that no table names
SOFTCAP, LEFT, RIGHT = 3.0, 150, 2
SIZES = {"e4m3": 4.0, "int8": 40.0}  # of numbers in caches of 8 bits
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
WILD = (2**31 - 1, -1, -(2**31), 10**6)  # pages of tables past what is used


def guarded(extents: Sequence[int], dtype: torch.dtype, *, rows_at: int) -> Guarded:
    """Return an unfilled view of `extents`, as they lie in memory, with a row of room on each side
    of its rows, which are dimension `rows_at`, and 32 bytes on each side of the last dimension.
    """
    room_elements = ROOM // dtype.itemsize
    outer = list(extents)
    outer[rows_at] += 2
    outer[-1] += 2 * room_elements
    room = torch.full(outer, -1, dtype=INTEGERS[dtype.itemsize], device=DEVICE)
    inside = torch.zeros(outer, dtype=torch.bool, device=DEVICE)

    def inner(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.narrow(rows_at, 1, extents[rows_at])
        return rows[..., room_elements : room_elements + extents[-1]]

    inner(inside).fill_(True)
    return Guarded(room, inner(room.view(dtype)), inside)


class Making:
    """What the parts of a call have in common."""

    def __init__(
        self,
        operation: DecodeOperation,
        shape: Shape,
        lengths: list[int],
        seed: int,
        heads_first: bool | None,
    ) -> None:
        self.operation, self.shape, self.seed = operation, shape, seed
        self.random = Random(seed)
        self.draws = torch.Generator(DEVICE).manual_seed(seed)
        self.heads_first = self.random.random() < 0.5 if heads_first is None else heads_first
        if not operation.lengths and operation.keys == "fixed":
            lengths = [self.most] * shape.batch
        if operation.keys == "packed" and sum(lengths) < 3:
            lengths = [shape.seq_k, *lengths[1:]]
        self.lengths = lengths
        self.starts = [0] * shape.batch
        if operation.starts:
            known = [[0, 1, length - 1, length, length + 70, -5] for length in lengths]
            self.starts = [
                self.random.choice((*some, self.random.randint(0, max(0, length))))
                for some, length in zip(known, lengths, strict=True)
            ]
        self.lists = self._lists()
        self.used = self._used()

    def normal(self, *extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=self.draws, device=DEVICE)

    @property
    def columns(self) -> int:
        """Of a page table."""
        return -(-self.shape.seq_k // self.operation.page) if self.operation.page else 0

    @property
    def most(self) -> int:
        """Keys that a sequence has room for."""
        return self.columns * self.operation.page or self.shape.seq_k

    @property
    def left(self) -> int:
        """Of a window that leaves something out."""
        most = min(self.most, sum(self.lengths)) if self.operation.keys == "packed" else self.most
        return min(LEFT, most - 2)

    def queries(self) -> Guarded:
        """Rows of q or of the result: [batch, rows, heads, dim], packed [total, heads, dim]."""
        shape, operation = self.shape, self.operation
        lead = (shape.batch, shape.seq_q)
        if operation.queries == "packed":
            lead = (int(self.lists["cu_seqlens_q"][-1]),)
        extents = (*lead, shape.heads, operation.dim)
        return guarded(extents, TORCH[operation.element], rows_at=len(lead) - 1)

    def cache(self) -> Guarded:
        """Keys or values as they lie in memory."""
        shape, operation = self.shape, self.operation
        dtype = TORCH[operation.element if operation.cache == "same" else operation.cache]
        if operation.keys == "packed":
            total = int(self.lists["cu_seqlens_k"][-1])
            return guarded((total, shape.kv_heads, operation.dim), dtype, rows_at=0)
        lead = (shape.batch, shape.seq_k)
        if operation.page:
            lead = (shape.batch * self.columns + SPARE, operation.page)
        if self.heads_first:
            return guarded((lead[0], shape.kv_heads, lead[1], operation.dim), dtype, rows_at=2)
        return guarded((*lead, shape.kv_heads, operation.dim), dtype, rows_at=1)

    def seen(self, view: torch.Tensor) -> torch.Tensor:
        """A cache as it is passed: heads first."""
        if view.dim() == 3 or self.heads_first:
            return view
        return view.transpose(1, 2)

    def _lists(self) -> dict[str, Any]:
        shape, operation = self.shape, self.operation
        found: dict[str, Any] = {}
        if operation.lengths:
            found["cache_seqlens"] = _int32(self.lengths)
        if operation.starts:
            found["cache_leftpad"] = _int32(self.starts)
        if operation.page:
            found["page_table"] = self._table()
        if operation.keys == "packed":
            found |= {"cu_seqlens_k": _ends(self.lengths), "max_seqlen_k": shape.seq_k}
        if operation.queries == "packed":
            rows = [self.random.randint(0, shape.seq_q) for _ in self.lengths]
            rows[self.random.randrange(shape.batch)] = shape.seq_q
            found |= {"cu_seqlens_q": _ends(rows), "max_seqlen_q": shape.seq_q}
        return found

    def _table(self) -> torch.Tensor:
        """Pages in random order, in rows that lie apart; what is not used leads anywhere."""
        page, batch = self.operation.page, self.shape.batch
        pages = list(range(batch * self.columns + SPARE))
        self.random.shuffle(pages)
        rows = []
        for index, length in enumerate(self.lengths):
            own = pages[index * self.columns : (index + 1) * self.columns]
            count = -(-min(max(length, 0), self.most) // page)
            wild = itertools.islice(itertools.cycle(WILD), self.columns - count)
            rows.append([*own[:count], *wild, -7, -7])
        return _int32(rows)[:, : self.columns]

    def _used(self) -> torch.Tensor:
        """Which rows count."""
        shape, operation = self.shape, self.operation
        starts = torch.tensor(self.starts, device=DEVICE)
        if operation.keys == "packed":
            place = torch.cat([torch.arange(length) for length in self.lengths]).to(DEVICE)
            lengths = torch.tensor(self.lengths, device=DEVICE)
            return place >= starts.repeat_interleave(lengths)
        if not operation.page:
            row = torch.arange(shape.seq_k, device=DEVICE)
            ends = torch.tensor(self.lengths, device=DEVICE)
            return (row >= starts[:, None]) & (row < ends[:, None])
        extents = shape.batch * self.columns + SPARE, operation.page
        used = torch.zeros(extents, dtype=torch.bool, device=DEVICE)
        for index, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            at = torch.arange(max(start, 0), max(start, 0, min(length, self.most)), device=DEVICE)
            pages = self.lists["page_table"][index].long()
            used[pages[at // operation.page], at % operation.page] = True
        return used

    def options(self) -> dict[str, Any]:
        """What a call is given beside tensors of q, k and v."""
        operation, shape = self.operation, self.shape
        found = {**self.lists, "causal": operation.mask != "none"}
        if operation.mask == "window":
            found["causal"] = self.seed % 2 == 0
            found["window"] = (self.left, None if found["causal"] else RIGHT)
        if operation.softcap:
            found["softcap"] = SOFTCAP
        if operation.sinks != "none":
            kind = "fp32" if operation.sinks == "fp32" else operation.element
            found["sinks"] = (2 * self.normal(shape.heads)).to(TORCH[kind])
        if operation.batch_invariant:
            found["batch_invariant"] = True
        if operation.scales != "none":
            found |= {name: self._scale() for name in ("scale_k", "scale_v")}
        return found

    def _scale(self) -> torch.Tensor:
        """Factors that bring a cache's numbers to about 1, of each head, of all, or of tokens."""
        operation, shape = self.operation, self.shape
        size = SIZES.get(operation.cache, 1.0)
        extents: tuple[int, ...] = (shape.kv_heads,)
        if operation.scales == "token":
            extents = (*self.used.shape, shape.kv_heads)
        elif self.seed % 3 == 0:
            extents = ()
        scale = (torch.rand(extents, generator=self.draws, device=DEVICE) + 0.5) / size
        return scale.transpose(1, 2) if len(extents) == 3 else scale


def _int32(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _ends(lengths: Sequence[int]) -> torch.Tensor:
    return _int32([0, *itertools.accumulate(lengths)])

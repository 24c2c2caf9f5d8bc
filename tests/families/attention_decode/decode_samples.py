"""Random calls of decode kernels as their launches take them, and what results must be, in float64.

Whatever no row may see is NaN, or 111 where the cache has whole numbers; tables name no page past
the last key's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from warploom.generator.families._attention.problem import UNBOUNDED
from warploom.generator.families.attention_decode import DecodeOperation, DecodeProblem

_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_UNIT = {"int8": 1 / 64, "e4m3": 1 / 8}  # a factor that makes codes about 1
_PAST = 2  # rows of a packed q that are no sequence's
BEFORE = 77.0  # what results hold before


@dataclass
class Sample:
    """One call: its problem, tensors by name, host scalars; and what kernels read, in float64."""

    problem: DecodeProblem
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, float]
    starts: list[int]  # of each sequence, the first key that rows see
    keys: list[torch.Tensor] = field(default_factory=list)  # [kv_heads, length, dim]
    values: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)  # [heads, rows, dim]


@dataclass
class _Cache:
    """Where keys lie: `place[b]` is [keys, 2], the entry and the row in it of each."""

    entries: int
    rows: int  # of an entry
    place: list[torch.Tensor]
    table_stride: int = 0


def _drawn(kind: torch.dtype, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    if kind is torch.int8:
        return torch.randint(-128, 128, shape, generator=random, dtype=torch.int16).to(kind)
    spread = 8 if kind is torch.float8_e4m3fn else 1
    return torch.randn(shape, generator=random).mul_(spread).to(kind)


def _poison(kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full(shape, 111 if kind is torch.int8 else math.nan).to(kind)


def _paged(
    page: int,
    lengths: list[int],
    columns: int,
    tensors: dict[str, torch.Tensor],
    random: torch.Generator,
) -> _Cache:
    batch = len(lengths)
    entries = batch * columns + 3
    order = torch.randperm(entries, generator=random)[: batch * columns].view(batch, columns)
    table = order.to(torch.int32)
    for b, length in enumerate(lengths):
        table[b, -(-max(0, min(length, columns * page)) // page) :] = 2**31 - 1 if b % 2 else -7
    tensors["page_table"] = table
    at = torch.arange(columns * page)
    place = [torch.stack([order[b, at // page], at % page], 1) for b in range(batch)]
    return _Cache(entries, page, place, columns)


def _packed(lengths: list[int], tensors: dict[str, torch.Tensor]) -> _Cache:
    firsts = [0, *accumulate(max(0, length) for length in lengths)]
    tensors["cu_seqlens_k"] = torch.tensor(firsts, dtype=torch.int32)
    every = torch.arange(firsts[-1])
    place = [torch.stack([every[a:b] * 0, every[a:b]], 1) for a, b in pairwise(firsts)]
    return _Cache(1, firsts[-1] + 5, place)


def _fixed(batch: int, seq_k: int) -> _Cache:
    at = torch.arange(seq_k)
    return _Cache(batch, seq_k, [torch.stack([at * 0 + b, at], 1) for b in range(batch)])


def _fill(
    one: Sample,
    operation: DecodeOperation,
    cache: _Cache,
    kv_heads: int,
    seen: list[range],
    random: torch.Generator,
) -> None:
    """Draw the keys and values that rows see, and their scales."""
    kind, unit = _TORCH[operation.kv.name], _UNIT.get(operation.cache, 1.0)
    shape = (cache.entries, kv_heads, cache.rows)
    for name, found in (("k", one.keys), ("v", one.values)):
        whole = _poison(kind, (*shape, operation.dim))
        of_tokens = torch.full(shape, math.nan)
        of_heads = (torch.rand(kv_heads, generator=random) + 0.5) * unit
        for place, keys in zip(cache.place, seen, strict=True):
            content = _drawn(kind, (kv_heads, keys.stop, operation.dim), random)
            content[:, : keys.start] = _poison(kind, (kv_heads, keys.start, operation.dim))
            factors = (torch.rand((kv_heads, keys.stop), generator=random) + 0.5) * unit
            factors[:, : keys.start] = math.nan
            entry, row = place[: keys.stop].T
            whole[entry, :, row] = content.transpose(0, 1)
            of_tokens[entry, :, row] = factors.T
            scales = {"token": factors, "head": of_heads[:, None]}
            scale = scales.get(operation.scales, torch.ones(1, 1))
            found.append(content.double() * scale.double()[..., None])
        one.tensors[name] = whole
        if operation.scales != "none":
            one.tensors[f"scale_{name}"] = of_tokens if operation.scales == "token" else of_heads


def _ask(
    one: Sample,
    operation: DecodeOperation,
    heads: int,
    seq_q: int,
    rows: list[int],
    random: torch.Generator,
) -> tuple[tuple[int, int, int], int]:
    """Draw q and make room for results; the strides of q, and rows of a packed one."""
    kind, dim, batch = _TORCH[operation.element], operation.dim, len(rows)
    if operation.queries == "packed":
        firsts = [0, *accumulate(rows)]
        total = firsts[-1] + _PAST
        q = torch.randn((total, heads, dim), generator=random).to(kind)
        one.tensors["cu_seqlens_q"] = torch.tensor(firsts, dtype=torch.int32)
        one.queries = [q[a:b].transpose(0, 1).double() for a, b in pairwise(firsts)]
        one.tensors["lse"] = torch.full((heads, total), BEFORE)
        strides = (0, dim, heads * dim)
    else:
        total = 0
        q = torch.randn((batch, seq_q, heads, dim), generator=random).to(kind)
        one.queries = [rows.transpose(0, 1).double() for rows in q]
        one.tensors["lse"] = torch.full((batch, heads, seq_q), BEFORE)
        strides = (seq_q * heads * dim, dim, heads * dim)
    one.tensors |= {"q": q, "o": torch.full_like(q, BEFORE)}
    if operation.sinks != "none":
        sinks = torch.randn(heads, generator=random)
        one.tensors["sinks"] = sinks.to(kind) if operation.sinks == "same" else sinks
    return strides, total


def sample(
    operation: DecodeOperation,
    *,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    seq_q: int,
    seq_k: int,
    rows: list[int] | None = None,
    starts: list[int] | None = None,
    left: int = UNBOUNDED,
    right: int = UNBOUNDED,
    seed: int = 0,
    device: str = "cpu",
) -> Sample:
    """A call of these lengths, of `rows` rows of q of each sequence where these are packed."""
    random = torch.Generator().manual_seed(seed)
    batch, dim = len(lengths), operation.dim
    rows = rows or [seq_q] * batch
    tensors: dict[str, torch.Tensor] = {}
    if operation.page:
        cache = _paged(operation.page, lengths, -(-seq_k // operation.page), tensors, random)
        seq_k = cache.table_stride * operation.page
    elif operation.keys == "packed":
        cache = _packed(lengths, tensors)
    else:
        cache = _fixed(batch, seq_k)
    if operation.lengths:
        tensors["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    if operation.starts:
        tensors["starts"] = torch.tensor(starts, dtype=torch.int32)
    told = operation.lengths or operation.keys == "packed"
    counts = [max(0, min(length if told else seq_k, seq_k)) for length in lengths]
    begins = [max(0, min(a, b)) for a, b in zip(starts or [0] * batch, counts, strict=True)]
    window = left if operation.mask == "window" else UNBOUNDED
    seen = [
        range(min(count, max(start, count - own - window)), count)
        for start, count, own in zip(begins, counts, rows, strict=True)
    ]
    scalars = {"scale": dim**-0.5, "softcap": 5.0}
    found = Sample(None, tensors, scalars, begins)  # type: ignore[arg-type]
    _fill(found, operation, cache, kv_heads, seen, random)
    strides_q, total_q = _ask(found, operation, heads, seq_q, rows, random)
    strides_k = (kv_heads * cache.rows * dim, cache.rows * dim, dim)
    of_tokens = (kv_heads * cache.rows, cache.rows, 1)
    found.problem = DecodeProblem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_k=seq_k,
        entries=cache.entries,
        entry_rows=cache.rows,
        strides_q=strides_q,
        strides_o=strides_q,
        strides_k=strides_k,
        strides_v=strides_k,
        total_q=total_q,
        table_stride=cache.table_stride,
        strides_scale_k=of_tokens,
        strides_scale_v=of_tokens,
        head_scale_stride=1,
        left=left,
        right=right,
    )
    found.tensors = {name: one.to(device) for name, one in tensors.items()}
    return found


Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def expected(operation: DecodeOperation, one: Sample) -> Results:
    """o and lse of each sequence, [heads, rows, dim] and [heads, rows], in float64."""
    outputs, sums = [], []
    problem, scale, softcap = one.problem, one.scalars["scale"], one.scalars["softcap"]
    for q, k, v, start in zip(one.queries, one.keys, one.values, one.starts, strict=True):
        heads, rows, _ = q.shape
        count = k.shape[1]
        k, v = (x.repeat_interleave(heads // problem.kv_heads, 0) for x in (k, v))
        s = torch.einsum("hrd,htd->hrt", q, k) * scale
        s = softcap * torch.tanh(s / softcap) if operation.softcap else s
        at, key = torch.arange(rows)[:, None] + count - rows, torch.arange(count)[None]
        hidden = (key < start).expand(rows, count)
        if operation.mask != "none":
            hidden = hidden | (key > at + problem.right)
        if operation.mask == "window":
            hidden = hidden | (key < at - problem.left)
        s = s.masked_fill(hidden, -math.inf)
        v = torch.where(hidden.all(0)[:, None], 0.0, v)
        if operation.sinks != "none":
            sink = one.tensors["sinks"].cpu().double()[:, None, None].expand(-1, rows, 1)
            lse = torch.cat([s, sink], -1).logsumexp(-1)
        else:
            lse = s.logsumexp(-1) if count else torch.full((heads, rows), -math.inf).double()
        outputs.append(torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None]) @ v)
        sums.append(lse)
    return outputs, sums


def left_by(operation: DecodeOperation, one: Sample) -> Results:
    """o and lse as the kernel left them, likewise."""
    o, lse = one.tensors["o"].cpu().double(), one.tensors["lse"].cpu().double()
    if operation.queries == "packed":
        spans = [slice(a, b) for a, b in pairwise(one.tensors["cu_seqlens_q"].tolist())]
        assert (o[-_PAST:] == BEFORE).all() and (lse[:, -_PAST:] == BEFORE).all()
        return [o[s].transpose(0, 1) for s in spans], [lse[:, s] for s in spans]
    return [x.transpose(0, 1) for x in o], list(lse)


def largest_error(operation: DecodeOperation, one: Sample) -> tuple[float, float]:
    """Of o, by the largest of its sequence, and of lse; infinite for NaN and for a lost -inf."""
    (wanted, sums), (found, logs) = expected(operation, one), left_by(operation, one)
    worst_o = worst_lse = 0.0
    for x, y in zip(wanted, found, strict=True):
        if x.numel():
            largest = max(1e-3, float(x.abs().max()))
            worst_o = max(worst_o, _furthest(x, y) / largest)
    for x, y in zip(sums, logs, strict=True):
        if not torch.equal(x == -math.inf, y == -math.inf):
            return worst_o, math.inf
        worst_lse = max(worst_lse, _furthest(x[x > -math.inf], y[y > -math.inf]))
    return worst_o, worst_lse


def _furthest(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().nan_to_num(nan=math.inf).max()) if x.numel() else 0.0


def options(**fields: Any) -> DecodeOperation:
    """An operation, bf16 of dimension 128 where nothing else is said."""
    return DecodeOperation(**{"element": "bf16", "dim": 128, **fields})

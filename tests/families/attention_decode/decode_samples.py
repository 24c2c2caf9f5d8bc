"""Random calls of decode kernels as their launches take them, and what results must be, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from warploom.generator.families.attention_decode import DecodeOperation, DecodeProblem
from warploom.generator.families._attention.problem import UNBOUNDED

_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


@dataclass
class Sample:
    """One call: its problem, tensors by name, host scalars, and what it should give."""

    problem: DecodeProblem
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, float]
    keys: list[torch.Tensor] = field(default_factory=list)  # [kv_heads, length, dim] float64
    values: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)  # [heads, rows, dim] float64


def _quantised(kind: torch.dtype, shape: tuple[int, ...], make: torch.Generator) -> torch.Tensor:
    if kind is torch.int8:
        return torch.randint(-128, 128, shape, generator=make, dtype=torch.int16).to(kind)
    return torch.randn(shape, generator=make).mul_(8 if kind is torch.float8_e4m3fn else 1).to(kind)


def _poison(kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if kind is torch.int8:
        return torch.full(shape, 111, dtype=kind)
    return torch.full(shape, math.nan).to(kind)


def sample(
    operation: DecodeOperation,
    *,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    seq_q: int,
    seq_k: int,
    rows: list[int] | None = None,
    left: int = UNBOUNDED,
    right: int = UNBOUNDED,
    seed: int = 0,
    device: str = "cpu",
) -> Sample:
    """A call of these lengths; whatever no row may see is NaN (of int8: 111)."""
    make = torch.Generator().manual_seed(seed)
    kind, kv = _TORCH[operation.element], _TORCH[operation.kv.name]
    batch, dim = len(lengths), operation.dim
    rows = rows or [seq_q] * batch
    tensors: dict[str, torch.Tensor] = {}
    # Where each sequence's keys lie: (entry, first row) of each key.
    if operation.page:
        page = operation.page
        columns = -(-seq_k // page)
        seq_k = columns * page
        entries = batch * columns + 3
        order = torch.randperm(entries, generator=make)[: batch * columns].view(batch, columns)
        table = order.to(torch.int32)
        for b, length in enumerate(lengths):  # nothing reads a page past the last key's
            table[b, -(-max(0, min(length, seq_k)) // page) :] = 2**31 - 1 if b % 2 else -7
        tensors["page_table"] = table
        entry_rows, table_stride = page, columns
        place = [[(int(order[b, t // page]), t % page) for t in range(seq_k)] for b in range(batch)]
    elif operation.keys == "packed":
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + max(0, length))
        entries, entry_rows, table_stride = 1, starts[-1] + 5, 0
        tensors["cu_seqlens_k"] = torch.tensor(starts, dtype=torch.int32)
        place = [[(0, starts[b] + t) for t in range(max(0, lengths[b]))] for b in range(batch)]
    else:
        entries, entry_rows, table_stride = batch, seq_k, 0
        place = [[(b, t) for t in range(seq_k)] for b in range(batch)]
    # lengths is read where the operation says so
    if operation.lengths:
        tensors["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    shape = (entries, kv_heads, entry_rows, dim)
    full = {one: _poison(kv, shape) for one in "kv"}
    scales = {one: torch.full(shape[:3], math.nan) for one in "kv"}
    head_scales = {one: torch.rand(kv_heads, generator=make) + 0.5 for one in "kv"}
    shrink = {"int8": 1 / 64, "e4m3": 1 / 8}.get(operation.cache, 1.0)
    found = Sample(None, tensors, {})  # type: ignore[arg-type]
    for b in range(batch):
        count = max(0, min(lengths[b] if operation.lengths or operation.keys == "packed" else seq_k, seq_k))
        seen = max(0, count - rows[b] - left) if operation.mask == "window" else 0
        seen = min(seen, count)
        made = {}
        for one in "kv":
            content = _quantised(kv, (kv_heads, count, dim), make)
            content[:, :seen] = _poison(kv, (kv_heads, seen, dim))
            scale = (torch.rand((kv_heads, count), generator=make) + 0.5) * shrink
            at = torch.tensor(place[b][:count], dtype=torch.long).view(-1, 2)
            full[one][at[:, 0], :, at[:, 1]] = content.transpose(0, 1)
            scales[one][at[:, 0], :, at[:, 1]] = scale.transpose(0, 1)
            exact = content.double()
            if operation.scales == "token":
                exact = exact * scale.double()[..., None]
            elif operation.scales == "head":
                exact = exact * head_scales[one].double()[:, None, None] * shrink
            made[one] = exact
        found.keys.append(made["k"])
        found.values.append(made["v"])
    if operation.scales == "head":
        for one in "kv":
            tensors[f"scale_{one}"] = head_scales[one] * shrink
    if operation.scales == "token":
        for one in "kv":
            tensors[f"scale_{one}"] = scales[one]
    tensors.update(full)
    # queries
    total = sum(rows)
    if operation.queries == "packed":
        q = torch.randn((total + 2, heads, dim), generator=make).to(kind)
        starts = [0]
        for count in rows:
            starts.append(starts[-1] + count)
        tensors["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32)
        found.queries = [q[starts[b] : starts[b + 1]].transpose(0, 1).double() for b in range(batch)]
        strides_q = (0, dim, heads * dim)
        tensors["lse"] = torch.full((heads, total + 2), 77.0)
        total_q = total + 2
    else:
        q = torch.randn((batch, seq_q, heads, dim), generator=make).to(kind)
        found.queries = [q[b].transpose(0, 1).double() for b in range(batch)]
        strides_q = (seq_q * heads * dim, dim, heads * dim)
        tensors["lse"] = torch.full((batch, heads, seq_q), 77.0)
        total_q = 0
    tensors["q"], tensors["o"] = q, torch.full_like(q, 77)
    if operation.sinks != "none":
        sinks = torch.randn(heads, generator=make)
        tensors["sinks"] = sinks.to(kind) if operation.sinks == "same" else sinks
    strides = (kv_heads * entry_rows * dim, entry_rows * dim, dim)
    per_token = (kv_heads * entry_rows, entry_rows, 1)
    found.problem = DecodeProblem(
        batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k, entries=entries,
        entry_rows=entry_rows, strides_q=strides_q, strides_o=strides_q, strides_k=strides,
        strides_v=strides, total_q=total_q, table_stride=table_stride, strides_scale_k=per_token,
        strides_scale_v=per_token, head_scale_stride=1, left=left, right=right,
    )
    found.scalars = {"scale": dim**-0.5, "softcap": 5.0}
    if device != "cpu":
        found.tensors = {name: one.to(device) for name, one in tensors.items()}
    return found


def expected(operation: DecodeOperation, one: Sample) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """o and lse of each sequence, [heads, rows, dim] and [heads, rows], in float64."""
    outputs, sums = [], []
    problem = one.problem
    for q, k, v in zip(one.queries, one.keys, one.values, strict=True):
        heads, rows, _ = q.shape
        count = k.shape[1]
        k, v = (x.repeat_interleave(heads // problem.kv_heads, 0) for x in (k, v))
        s = torch.einsum("hrd,htd->hrt", q, k) * one.scalars["scale"]
        if operation.softcap:
            s = one.scalars["softcap"] * torch.tanh(s / one.scalars["softcap"])
        at, t = torch.arange(rows)[:, None] + count - rows, torch.arange(count)[None]
        hidden = torch.zeros(rows, count, dtype=torch.bool)
        if operation.mask != "none":
            hidden |= t > at + problem.right
        if operation.mask == "window":
            hidden |= t < at - problem.left
        s = s.masked_fill(hidden, -math.inf)
        v = torch.where(hidden.all(0)[:, None], 0.0, v)
        if operation.sinks != "none":
            sink = one.tensors["sinks"].cpu().double()[:, None, None].expand(-1, rows, 1)
            lse = torch.logsumexp(torch.cat([s, sink], -1), -1)
        else:
            lse = torch.logsumexp(s, -1) if count else torch.full((heads, rows), -math.inf).double()
        weights = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None])
        outputs.append(weights @ v)
        sums.append(lse)
    return outputs, sums


def found(operation: DecodeOperation, one: Sample) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """o and lse as the kernel left them, likewise."""
    o, lse = one.tensors["o"].cpu().double(), one.tensors["lse"].cpu().double()
    if operation.queries == "packed":
        ends = one.tensors["cu_seqlens_q"].tolist()
        spans = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
        return [o[s].transpose(0, 1) for s in spans], [lse[:, s] for s in spans]
    return [x.transpose(0, 1) for x in o], list(lse)


def largest_error(operation: DecodeOperation, one: Sample) -> tuple[float, float]:
    """Of o, relative to the largest of its sequence, and of lse; infinite for NaN and misplaced -inf."""
    worst = [0.0, 0.0]
    for k, (want, have) in enumerate(zip(expected(operation, one), found(operation, one), strict=True)):
        for x, y in zip(want, have, strict=True):
            if not x.numel():
                continue
            if k == 1:
                if not torch.equal(x == -math.inf, y == -math.inf):
                    return math.inf, math.inf
                x, y = x[x > -math.inf], y[y > -math.inf]
                if not x.numel():
                    continue
            error = (x - y).abs().max() / (max(1e-3, float(x.abs().max())) if k == 0 else 1)
            worst[k] = max(worst[k], float(torch.nan_to_num(error, nan=math.inf)))
    return worst[0], worst[1]


def options(**fields: Any) -> DecodeOperation:
    """An operation, bf16 of dimension 128 where nothing else is said."""
    return DecodeOperation(**{"element": "bf16", "dim": 128, **fields})

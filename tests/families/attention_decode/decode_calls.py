"""Calls of decoding on the CPU: caches of every kind, and results by the documentation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import warploom

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
INF = torch.inf


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    drawn = torch.randn(shape, generator=generator)
    if dtype == torch.int8:
        return (drawn * 40).clamp(-127, 127).to(dtype)
    return (drawn * 4 if dtype == E4M3 else drawn).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ends(*lengths: int) -> torch.Tensor:
    return ints(0, *torch.tensor(lengths).cumsum(0).tolist())


@dataclass
class Case:
    """A call, and each sequence's rows of q and keys as they would lie by themselves.

    q [heads, rows, dim], keys and values [kv_heads, keys, dim] in fp32, scales applied.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keywords: dict[str, Any] = field(default_factory=dict)
    alone: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def given(self, **more: Any) -> Case:
        """The same with more keywords."""
        return replace(self, keywords=self.keywords | more)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        out, lse = warploom.attention_decode(
            self.q, self.k, self.v, return_lse=True, **self.keywords
        )
        assert (out.dtype, lse.dtype) == (self.q.dtype, torch.float32)
        assert out.shape == self.q.shape
        return out, lse

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """out [heads, rows, dim] and lse [heads, rows] of each sequence."""
        out, lse = self.run()
        if self.q.dim() == 4:
            return list(zip(out, lse, strict=True))
        starts = self.keywords["cu_seqlens_q"].tolist()
        parts = [slice(*pair) for pair in itertools.pairwise(starts)]
        return [(out[one].transpose(0, 1), lse[:, one]) for one in parts]

    def assert_right(self) -> None:
        """Hold every row against float64, by the words of the documentation."""
        unit = torch.finfo(self.q.dtype).eps / 2
        starts = self.keywords.get("cache_leftpad")
        for i, (one, (out, lse)) in enumerate(zip(self.alone, self.results(), strict=True)):
            start = 0 if starts is None else int(starts[i])
            wanted, wanted_lse = expected(*one, self.keywords, start)
            assert ((out.double() - wanted).abs() <= unit * wanted.abs() + 1e-5).all()
            assert torch.allclose(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict[str, Any], start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of one sequence in float64, row by row."""
    heads, rows, dim = q.shape
    kv_heads, keys = k.shape[:2]
    left, right = keywords.get("window") or (None, None)
    sinks = keywords.get("sinks")
    out = torch.zeros(heads, rows, v.shape[-1], dtype=torch.float64)
    lse = torch.full((heads, rows), -INF, dtype=torch.float64)
    for row in range(rows):
        diagonal = row + keys - rows
        columns = [
            column
            for column in range(start, keys)
            if (not keywords.get("causal", True) or column <= diagonal)
            and (left is None or column >= diagonal - left)
            and (right is None or column <= diagonal + right)
        ]
        for head in range(heads):
            shared = head // (heads // kv_heads)
            s = k[shared, columns].double() @ q[head, row].double()
            s = s * (keywords.get("scale") or dim**-0.5)
            if cap := keywords.get("softcap"):
                s = cap * torch.tanh(s / cap)
            every = s if sinks is None else torch.cat((s, sinks[head].double()[None]))
            if every.numel():
                lse[head, row] = every.logsumexp(0)
                out[head, row] = (s - lse[head, row]).exp() @ v[shared, columns].double()
    return out, lse


# ---- Caches --------------------------------------------------------------------------------------


def fixed(
    lengths: tuple[int, ...],
    *,
    rows: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    room: int = 40,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
) -> Case:
    """A cache with rows for `room` keys of each sequence."""
    batch = len(lengths)
    q = random(batch, rows, heads, dim, dtype=dtype).transpose(1, 2)
    k, v = (random(batch, kv_heads, room, dim, dtype=cache or dtype, seed=s) for s in (1, 2))
    alone = [
        (q[i], k[i, :, :length].float(), v[i, :, :length].float())
        for i, length in enumerate(lengths)
    ]
    return Case(q, k, v, {"cache_seqlens": ints(*lengths)}, alone)


def paged(
    lengths: tuple[int, ...],
    *,
    page: int = 16,
    columns: int = 3,
    rows: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    layout: str = "HND",
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
) -> Case:
    """Pages in random order, those that no sequence uses full of NaN where there is one."""
    batch, kind = len(lengths), cache or dtype
    pages = batch * columns + 2
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(3))[: batch * columns]
    table = table.reshape(batch, columns).int()
    extents = (pages, kv_heads, page, dim) if layout == "HND" else (pages, page, kv_heads, dim)
    k, v = (random(*extents, dtype=kind, seed=s) for s in (1, 2))
    if layout == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    used = {
        int(page_) for i, n in enumerate(lengths) for page_ in table[i, : -(-n // page)].tolist()
    }
    if kind in (BF16, FP16):
        for index in set(range(pages)) - used:
            k[index], v[index] = torch.nan, torch.nan
    q = random(batch, rows, heads, dim, dtype=dtype).transpose(1, 2)
    alone = []
    for i, length in enumerate(lengths):
        rows_of = [
            t[table[i, : -(-length // page)]].transpose(0, 1).flatten(1, 2)[:, :length].float()
            for t in (k, v)
        ]
        alone.append((q[i], rows_of[0], rows_of[1]))
    return Case(q, k, v, {"cache_seqlens": ints(*lengths), "page_table": table}, alone)

"""What `attention_append` does, row by row, in the plainest way there is."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from warploom.runtime.families.attention_append.call import AttentionAppendCall as Call

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def appended(call: Call) -> tuple[dict[tuple[str, int, int, int], torch.Tensor], dict[Any, Any]]:
    """What is written: rows of caches by cache, page, head and row, and their scales likewise."""
    rows: dict[tuple[str, int, int, int], torch.Tensor] = {}
    scales: dict[Any, Any] = {}
    for sequence, index, token in tokens(call):
        length = int(call.lengths[sequence])
        place = located(call, sequence, length + index) if length >= 0 else None
        if place is None:
            continue
        for name, head in itertools.product(("k", "v"), range(call.k_cache.shape[1])):
            row = of(getattr(call, name), call, sequence, index, token, head).float()
            if name == "k":
                row = turned(row, call, length + index)
            scale = getattr(call, f"scale_{name}")
            if scale is not None and scale.dim() == 3:
                largest = min(
                    max(float(row.abs().max()), 2.0**-100), torch.finfo(torch.float32).max
                )
                one = torch.tensor(largest) / LARGEST[call.k_cache.dtype]
                scales[(name, place[0], head, place[1])] = one
                row = row * (1 / one)
            elif scale is not None:
                row = row * (1 / scale.reshape(-1)[head if scale.numel() > 1 else 0])
            rows[(name, place[0], head, place[1])] = coded(row, call.k_cache.dtype)
    return rows, scales


def tokens(call: Call) -> list[tuple[int, int, int]]:
    """Sequence, index in it, and place among all, of every new token."""
    if call.cu_seqlens is None:
        batch, seq = call.k.shape[0], call.k.shape[2]
        return [(s, i, s * seq + i) for s in range(batch) for i in range(seq)]
    starts = call.cu_seqlens.tolist()
    return [
        (s, token - begin, token)
        for s, (begin, end) in enumerate(itertools.pairwise(starts))
        for token in range(begin, end)
    ]


def of(
    one: torch.Tensor, call: Call, sequence: int, index: int, token: int, head: int
) -> torch.Tensor:
    """One row of k, v or q."""
    return one[sequence, head, index] if call.cu_seqlens is None else one[token, head]


def located(call: Call, sequence: int, position: int) -> tuple[int, int] | None:
    """The page of a position, and the row in it."""
    rows = call.k_cache.shape[2]
    if call.page_table is None:
        return (sequence, position) if position < rows else None
    column = position // rows
    if column >= call.page_table.shape[1]:
        return None
    page = int(call.page_table[sequence, column])
    return (page, position % rows) if 0 <= page < call.k_cache.shape[0] else None


def turned(row: torch.Tensor, call: Call, position: int) -> torch.Tensor:
    """A row of fp32, whose first numbers are turned in pairs."""
    if call.cos is None:
        return row
    half = call.cos.shape[1]
    at = min(max(position, 0), call.cos.shape[0] - 1)
    found = row.clone()
    for pair in range(half):
        x, y = (2 * pair, 2 * pair + 1) if call.interleaved else (pair, pair + half)
        cos, sin = call.cos[at, pair].float(), call.sin[at, pair].float()
        found[x] = row[x] * cos - row[y] * sin
        found[y] = row[y] * cos + row[x] * sin
    return found


def coded(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A row as a cache has it."""
    if dtype == torch.int8:
        return torch.tensor([max(-128, min(127, round(float(x)))) for x in row], dtype=dtype)
    if dtype == torch.float8_e4m3fn:
        return row.clamp(-448, 448).to(dtype)
    return row.to(dtype)

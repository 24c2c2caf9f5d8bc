"""The arguments of calls that the tests share, and what must be in their caches afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import append_reference
import torch

import warploom
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_append.family import filled, written

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def given(
    lengths: tuple[int, ...] = (3, 0, 17, 9),
    seq: int = 2,
    *,
    dim: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    page: int = 0,
    packed: tuple[int, ...] = (),
    cache: torch.dtype | None = None,
    scales: str = "",
    rotary: int = 0,
    table: torch.dtype = torch.float32,
    interleaved: bool = False,
    dtype: torch.dtype = BF16,
    rows: int = 24,
) -> dict[str, Any]:
    """The arguments of a call; caches and scales have the same bytes everywhere."""
    torch.manual_seed(sum(lengths))
    batch = len(lengths)

    def new(heads: int) -> torch.Tensor:
        if packed:
            return torch.randn(sum(packed), heads, dim).to(dtype)
        return torch.randn(batch, seq, heads, dim).to(dtype).transpose(1, 2)

    def room(*extents: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(extents, dtype=dtype)
        filled(made)
        return made

    columns = -(-rows // page) if page else 1
    pages, page_rows = (batch * columns + 3, page) if page else (batch, rows)
    found: dict[str, Any] = {
        "k_cache": room(pages, kv_heads, page_rows, dim, dtype=cache or dtype),
        "v_cache": room(pages, page_rows, kv_heads, dim, dtype=cache or dtype).transpose(1, 2),
        "k": new(kv_heads),
        "v": new(kv_heads),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    if page:
        order = torch.randperm(pages)[: batch * columns]
        found["page_table"] = order.view(batch, columns).to(torch.int32)
    if packed:
        found["cu_seqlens"] = torch.tensor((0, *itertools.accumulate(packed)), dtype=torch.int32)
    if rotary:
        angles = torch.rand(rows + 4, rotary // 2) * 6
        found |= {"cos": angles.cos().to(table), "sin": angles.sin().to(table)}
        found |= {"interleaved": interleaved, "q": new(heads)}
    if scales == "token":
        for name in ("scale_k", "scale_v"):
            found[name] = room(pages, kv_heads, page_rows, dtype=torch.float32)
    elif scales:
        numbers = torch.rand(2, kv_heads) / 8 + 0.01
        found["scale_k"], found["scale_v"] = numbers if scales == "head" else numbers[:, 0]
    return found


def bits(one: torch.Tensor) -> torch.Tensor:
    return one.contiguous().view(INTEGERS[one.dtype.itemsize])


def assert_appended(arguments: dict[str, Any]) -> torch.Tensor | None:
    """Every row is where it belongs, to the bit, and no other byte is another."""
    call = AttentionAppendCall(**arguments)
    before = {name: one.clone() for name, one in written(call).items()}
    rows, scales = append_reference.appended(call)
    found = warploom.append_kv_cache(**arguments)
    for (name, *place), row in rows.items():
        before[f"{name}_cache"][tuple(place)].view(torch.int8)[:] = row.view(torch.int8)
    for (name, *place), scale in scales.items():
        before[f"scale_{name}"][tuple(place)] = scale
    for name, one in written(call).items():
        assert torch.equal(bits(one), bits(before[name])), name
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": torch.float16, "dim": 80},
    "one token": {"seq": 1},
    "no token": {"seq": 0},
    "pages": {"page": 8},
    "pages of 5 rows": {"page": 5, "seq": 7},
    "packed": {"packed": (3, 0, 1, 4)},
    "packed, in pages": {"packed": (0, 5, 0, 4), "page": 8, "rotary": 32},
    "halves": {"rotary": 32},
    "some of a row in halves": {"rotary": 16, "dim": 64},
    "interleaved": {"rotary": 32, "interleaved": True},
    "some of a row interleaved": {"rotary": 48, "dim": 64, "interleaved": True},
    "tables of 16 bits": {"rotary": 32, "table": BF16, "page": 8},
    "e4m3": {"cache": E4M3},
    "e4m3, a scale": {"cache": E4M3, "scales": "tensor"},
    "e4m3, scales of heads": {"cache": E4M3, "scales": "head", "rotary": 32},
    "e4m3, scales of tokens": {"cache": E4M3, "scales": "token", "page": 8, "rotary": 16},
    "int8, a scale": {"cache": torch.int8, "scales": "tensor"},
    "int8, scales of heads": {"cache": torch.int8, "scales": "head"},
    "int8, scales of tokens": {"cache": torch.int8, "scales": "token", "packed": (1, 2, 3, 4)},
    "full": {"lengths": (22, 23, 24, 25), "seq": 4, "page": 8},
    "full, and at the end of a cache": {"lengths": (22, 23, 24, 2**31 - 1), "seq": 4},
    "sequences that are left out": {"lengths": (-1, 4, -(2**31), 2), "seq": 3, "rotary": 32},
}

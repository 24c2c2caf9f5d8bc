"""Masks of keys for the gpu tests, and the kernels of both passes that they go to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_cases import Shape, chosen, spec

from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.modifiers.score_tensors import room_for

MASKED: dict[str, Any] = {"masked": True}
FORWARD: list[KernelSpec] = [
    *(chosen(dim, further=MASKED) for dim in (32, 64, 96, 128, 192, 256)),
    chosen(64, mask="causal", softcap=True, further=MASKED),
    chosen(128, mask="causal", element="fp16", further=MASKED),
    *(chosen(dim, mask="window", further=MASKED) for dim in (96, 128)),
    chosen(64, lengths="packed", further=MASKED),
    chosen(128, mask="causal", lengths="packed", further=MASKED),
    chosen(128, mask="window", lengths="packed", further=MASKED),
    chosen(128, further={"bias": "fp32", **MASKED}),
    chosen(64, mask="causal", further={"alibi": True, **MASKED}),
    chosen(128, mask="causal", further={"sinks": "fp32", **MASKED}),
    chosen(64, further={"dropout": True, **MASKED}),
    chosen(128, mask="causal", further={"dropout": True, **MASKED}),
    spec(64, 64, dim=64, scheduler="dynamic", further=MASKED),
    spec(128, 80, dim=64, scheduler="single", mask="causal", overlap=False, further=MASKED),
    spec(192, 64, dim=64, mask="causal", further=MASKED),
]
EXTENTS: dict[str, Shape] = {
    "few rows": Shape(3, 4, 2, 65, 1021),
    "several tiles": Shape(4, 6, 2, 509, 777),
    "more tiles than multiprocessors": Shape(5, 33, 11, 257, 193),
}


def _between(firsts: torch.Tensor, ends: torch.Tensor, columns: int) -> torch.Tensor:
    """Shown from the first on, before the end: [..., 1, columns]."""
    place = torch.arange(columns, device="cuda")
    return (place >= firsts[..., None, None]) & (place < ends[..., None, None])


def _ends(shape: Shape, *heads: int) -> torch.Tensor:
    """As many lengths as batches, or heads of all: the longest, one, none, and others."""
    count = shape.batch * (heads[0] if heads else 1)
    others = torch.arange(count, device="cuda") * 97 % (shape.seq_k + 1)
    known = torch.tensor([shape.seq_k // 2, 0, shape.seq_k, 1], device="cuda")[:count]
    others[: len(known)] = known
    return others.view(shape.batch, heads[0] if heads else 1)


def _right(shape: Shape) -> torch.Tensor:
    ends = _ends(shape)
    return _between(torch.zeros_like(ends), ends, shape.seq_k)


def _left(shape: Shape) -> torch.Tensor:
    return _right(shape).flip(3)


def _both(shape: Shape) -> torch.Tensor:
    ends = _ends(shape)
    return _between(ends // 3, ends, shape.seq_k)


def _of_heads(shape: Shape) -> torch.Tensor:
    ends = _ends(shape, shape.heads)
    return _between(ends // 2, ends, shape.seq_k)


def _holes(shape: Shape) -> torch.Tensor:
    draws = torch.Generator("cuda").manual_seed(5)
    shown = torch.rand(shape.batch, 1, 1, shape.seq_k, generator=draws, device="cuda") < 0.8
    shown &= _both(shape)
    shown[..., shape.seq_k // 4 : shape.seq_k // 2] = False
    return shown


def _shared(shape: Shape) -> torch.Tensor:
    return _both(shape)[:1]


def _expanded(shape: Shape) -> torch.Tensor:
    rows = room_for(shape.seq_k, _right(shape))
    return rows.expand(shape.batch, shape.heads, shape.seq_q, shape.seq_k)


def _one_hidden(shape: Shape) -> torch.Tensor:
    shown = torch.ones(shape.batch, 1, 1, shape.seq_k, dtype=torch.bool, device="cuda")
    shown[..., shape.seq_k // 2] = False
    return shown


def _of_a_tile(shape: Shape, more: int) -> torch.Tensor:
    """As many whole tiles of 128, and so many more: of kernels whose tiles these are."""
    ends = torch.full((shape.batch, 1), 128 + more, device="cuda")
    return _between(torch.zeros_like(ends), ends, shape.seq_k)


def _all(shape: Shape) -> torch.Tensor:
    return torch.ones(shape.batch, 1, 1, shape.seq_k, dtype=torch.bool, device="cuda")


def _none(shape: Shape) -> torch.Tensor:
    return ~_all(shape)


PATTERNS: dict[str, Callable[[Shape], torch.Tensor]] = {
    "right": _right,
    "left": _left,
    "both ends": _both,
    "of heads": _of_heads,
    "holes": _holes,
    "one hidden": _one_hidden,
    "shared": _shared,
    "expanded": _expanded,
    "one of a tile": partial(_of_a_tile, more=1),
    "all but the last of a tile": partial(_of_a_tile, more=-1),
    "all": _all,
    "none": _none,
}


def mask(name: str, shape: Shape) -> torch.Tensor:
    """A mask of keys that kernels read where it lies."""
    made = PATTERNS[name](shape)
    return made if name == "expanded" else room_for(shape.seq_k, made)

"""q, k and v of attention in 8 bits, beside torch's operations, compiled, and a copy of as many
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from benchmarks.peers._moving import copy_of
from warploom.generator.configurations import cells
from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeShape,
)
from warploom.runtime.baselines import Results, compiled
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall
from warploom.runtime.families.attention_quantize.family import FAMILY as RUNTIME
from warploom.runtime.families.attention_quantize.family import bytes_of
from warploom.runtime.plan import run
from warploom.runtime.trial import difference_share


def operations(dim: int) -> dict[str, AttentionQuantizeOperation]:
    """By name: both types of scores, and v alone."""
    return {
        "int8, smoothed": AttentionQuantizeOperation("bf16", dim, "int8", smooth=True),
        "e4m3": AttentionQuantizeOperation("bf16", dim, "e4m3"),
        "v alone": AttentionQuantizeOperation("e4m3", dim, "none"),
    }


def cases(_asked: Asked) -> Iterator[Case]:
    """Each operation at each dimension and length, of as many tokens."""
    sizes = cells()["attention_quantize"]
    for dim in sizes["dim"]:
        heads = sizes["hidden"] // dim
        for name, operation in operations(dim).items():
            for seq in sizes["seq"]:
                of_q = (heads, seq) if operation.quantizes else (0, 0)
                shape = AttentionQuantizeShape(sizes["tokens"] // seq, of_q[0], heads, of_q[1], seq)
                floor = Floor.of(0.0, bytes_of(RUNTIME.draw(operation, shape, "meta", None)))
                about = {**asdict(shape), "seq": seq, "dim": dim, "type": "bf16", "operation": name}
                make = partial(contenders, operation, shape)
                yield Case(f"{name} d{dim} {seq}", about, floor, make)


def contenders(
    operation: AttentionQuantizeOperation, shape: AttentionQuantizeShape, asked: Asked
) -> list[Contender]:
    """Warploom as dispatched, torch, a copy, and each kernel that computes the same."""
    make = partial(RUNTIME.draw, operation, shape, asked.device, None)
    moved = bytes_of(RUNTIME.draw(operation, shape, "meta", None))
    fast = compiled(_quantized) if asked.device == "cuda" else _quantized  # no compiler on the CPU
    torchs = partial(torch_compiled, fast)
    first, *others = moving(
        make, moved, operation, asked, ours=run, torchs=torchs, error_share=wrong
    )
    return [first, *others, copy_of(moved, asked.device)]


def wrong(one: AttentionQuantizeCall, call: Callable[[], Any]) -> float:
    """The largest error of what a call on these operands returns, as a share of its bound."""
    return RUNTIME.share(call(), one)


def torch_compiled(
    function: Callable[..., Results], given: Sequence[AttentionQuantizeCall]
) -> Contender:
    """torch's operations, as its compiler fuses them."""

    def call(one: AttentionQuantizeCall) -> Results:
        return function(one.v, one.q, one.k, one.scores, one.smooth)

    def error_share() -> float:
        right = [one for one in given[0].computed_by_torch() if one is not None]
        return max(map(difference_share, call(given[0]), right))

    return Contender("torch", [partial(call, one) for one in given], error_share, peer=True)


def _quantized(
    v: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor | None, scores: str, smooth: bool
) -> list[torch.Tensor]:
    results = AttentionQuantizeCall(v, q, k, scores, smooth).computed_by_torch()
    return [one for one in results if one is not None]


class Quantizing(Family):
    """Operands of attention in 8 bits."""

    def at(self, problem: Problem) -> int:
        """The length."""
        return int(problem["seq"])

    def subject(self, problem: Problem) -> str:
        """The operation, and the dimension."""
        return f"{problem['operation']}, dimension {problem['dim']}"


FAMILY = Quantizing(
    name="attention_quantize",
    groups={"quantizations": Group("{kind}", cases, "{kind}")},
    grid=("quantizations",),
    kinds={"bf16": "Operands of attention in 8 bits, from bf16"},
    peers={"torch": "torch"},
    called={"torch": "torch's operations, compiled"},
    axis=("length", "length"),
    divided="operation",
)

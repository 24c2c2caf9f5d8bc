"""Partial results of attention, merged, beside torch's operations that come to the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from warploom.generator.configurations import cells
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeShape,
)
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.attention_merge.api import merge_state
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.family import FAMILY as RUNTIME
from warploom.runtime.sampled import share

OPERATIONS = {
    "bf16": AttentionMergeOperation("bf16", "bf16", "bf16", 128),
    "fp32": AttentionMergeOperation("fp32", "bf16", "fp32", 128),
}


def cases(_asked: Asked) -> Iterator[Case]:
    """Results of each type, of the listed rows."""
    for name, operation in OPERATIONS.items():
        for rows in cells()["attention_merge"]["rows"]:
            floor = Floor.of(0.0, rows * operation.row_bytes)
            about = {"m": rows, "dim": operation.dim, "type": "bf16", "operation": name}
            make = partial(contenders, operation, AttentionMergeShape(rows))
            yield Case(f"{name} {rows}x{operation.dim}", about, floor, make)


def contenders(
    operation: AttentionMergeOperation, shape: AttentionMergeShape, asked: Asked
) -> list[Contender]:
    """Warploom as dispatched, torch, and each kernel that competes and computes the same."""
    make = partial(RUNTIME.draw, operation, shape, asked.device, None)
    moved = shape.rows * operation.row_bytes
    return moving(make, moved, operation, asked, ours=ours, torchs=torchs, error_share=wrong)


def ours(one: AttentionMergeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Warploom."""
    operands = (one.out_a, one.lse_a, one.out_b, one.lse_b)
    return merge_state(*operands, out=one.out, lse=one.lse, spec=one.spec)


def wrong(one: AttentionMergeCall, call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest error of what a call on these operands returns, as a share of its bound."""
    return share(call(), RUNTIME.expected(one))


def torchs(given: Sequence[AttentionMergeCall]) -> Contender:
    """torch's logaddexp, and two weighted results, each operation a pass of its own."""
    wanted = given[0].out_a.dtype if given[0].out is None else given[0].out.dtype

    def call(one: AttentionMergeCall) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp(one.lse_a, one.lse_b)
        weight_a, weight_b = ((log - lse).exp()[..., None] for log in (one.lse_a, one.lse_b))
        out = one.out_a * weight_a + one.out_b * weight_b
        return out.to(wanted), lse

    return Contender(
        "torch",
        [partial(call, one) for one in given],
        lambda: share(call(given[0]), RUNTIME.expected(given[0])),
        peer=True,
    )


class Merging(Family):
    """Two results of attention as one."""

    def subject(self, problem: Problem) -> str:
        """The type of what adds up."""
        return f"{problem['operation']}, dimension {problem['dim']}"


FAMILY = Merging(
    name="attention_merge",
    groups={"merges": Group("{kind}", cases, "{kind}")},
    grid=("merges",),
    kinds={"bf16": "Merging results of attention, bf16"},
    peers={"torch": "torch"},
    called={"torch": "torch's operations"},
    axis=("rows", "rows"),
    divided="result",
)

"""Partial results of attention, merged, beside torch's operations that come to the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.attention_merge.api import attention_merge
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.trial import bounds, draw, share
from warploom.runtime.plan import Plan, make

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
    make = partial(draw, operation, shape, asked.device, None)
    given = rotated(make, shape.rows * operation.row_bytes, asked.device)
    peers = [torchs(given)] if not asked.peers or "torch" in asked.peers else []
    fitting = [spec for spec in asked.specs if spec.operation == operation]
    return [ours(given), *peers, *(ours(given, spec.name, spec) for spec in fitting)]


def ours(
    given: Sequence[AttentionMergeCall], name: str = "warploom", spec: KernelSpec | None = None
) -> Contender:
    """Warploom: as dispatched, or by one kernel."""

    def call(one: AttentionMergeCall) -> tuple[torch.Tensor, torch.Tensor]:
        operands = (one.out_a, one.lse_a, one.out_b, one.lse_b)
        return attention_merge(*operands, out=one.out, lse=one.lse, spec=spec)

    def told() -> tuple[str, str]:
        choice = make(replace(given[0], spec=spec), Plan).choice
        return choice.spec.name, choice.reason

    first = given[0]
    return Contender(
        name, [partial(call, one) for one in given], lambda: share(call(first), bounds(first)), told
    )


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
        lambda: share(call(given[0]), bounds(given[0])),
        peer=True,
    )


class Merging(Family):
    """Two results of attention as one."""

    def at(self, problem: Problem) -> int:
        """Rows."""
        return int(problem["m"])

    def subject(self, problem: Problem) -> str:
        """The type of what adds up."""
        return f"{problem['operation']}, dimension {problem['dim']}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By rows."""
        return (problem["m"],)

    def flops(self, problem: Problem) -> float | None:
        """None: memory limits them."""
        return None

    def division(self, problem: Problem) -> str:
        """The type of what adds up."""
        return str(problem["operation"])


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

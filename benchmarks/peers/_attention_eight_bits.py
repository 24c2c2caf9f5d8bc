"""Attention of 8 bits beside that of 16: e4m3, and int8 with scales of rows and of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._attention_problem import Attention
from warploom.generator.configurations import cells
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.families.attention_forward.rules import MOST_PROMOTED
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.attention_forward import values
from warploom.runtime.families.attention_forward.eight_bit_trial import EightBitTrial
from warploom.runtime.families.attention_forward.trial import AttentionTrial
from warploom.runtime.measure import Call

TITLE = "8 bits"
LAID_OUT = "warploom, v by keys"  # a contender: v is laid out anew in each call
WIDE = "warploom, bf16"
KINDS: dict[str, dict[str, Any]] = {
    "e4m3": {"scores": "e4m3", "weights": "e4m3"},
    "int8": {"scores": "int8", "weights": "e4m3", "scales": "blocks"},
}


def cases(asked: Asked) -> Iterator[Case]:
    """A cell for each problem and kind."""
    for problem in problems():
        for kind in KINDS:
            about = {**problem.record("forward", 2), "type": kind}
            make = partial(contenders, problem, kind)
            yield Case(f"{problem.name} forward, {kind}", about, Floor.of(about["flops"]), make)


def problems() -> Iterator[Attention]:
    """The squares of the lists, and heads that share keys."""
    listed = cells()["attention"]
    listed = {**listed, **listed["eight_bits"]}
    for dim in listed["dim"]:
        for causal in listed["causal"]:
            for seq in listed["seq"]:
                heads, mask = listed["hidden"] // dim, "causal" if causal else "full"
                batch = listed["tokens"] // seq
                yield Attention(f"d{dim} {mask} {seq}", batch, heads, heads, seq, dim, causal)
    for batch, heads, kv_heads, seq, dim, causal in listed["grouped"]:
        mask = "causal" if causal else "full"
        name = f"d{dim} {mask} {seq}, {heads}/{kv_heads} heads"
        yield Attention(name, batch, heads, kv_heads, seq, dim, causal)


def operation(problem: Attention, kind: str) -> AttentionOperation:
    """What is computed, with sums that are promoted where a kernel has them."""
    promoted = problem.dim <= MOST_PROMOTED
    sums = {} if promoted else {"sums": "fast"}
    return AttentionOperation(**problem.operation, **KINDS[kind], **sums)


def contenders(problem: Attention, kind: str, asked: Asked) -> list[Contender]:
    """Warploom on v as its kernels read it, and by keys, each kernel that competes; its bf16."""
    wanted = operation(problem, kind)
    shape = AttentionShape(
        problem.batch, problem.heads, problem.kv_heads, problem.seq, problem.seq, problem.dim
    )
    trial = EightBitTrial(wanted, shape, asked.device, 0)
    wide = AttentionTrial(AttentionOperation(**problem.operation), shape, asked.device, 0)
    fitting = [spec for spec in asked.specs if spec.operation == wanted]

    def told() -> tuple[str, str]:
        one = trial.sets[0]
        keywords = {**one.lengths, **trial.keywords}
        found = warploom.explain(one.q, one.k, one.v, **keywords)
        return found.kernel, found.reason

    return [
        Contender("warploom", _calls(trial), trial.held_share, told),
        Contender(LAID_OUT, _calls(trial, by_keys=True), trial.held_share),
        *(Contender(spec.name, trial.calls(spec), trial.held_share) for spec in fitting),
        Contender(WIDE, _calls(wide), wide.held_share),
    ]


def _calls(trial: AttentionTrial, *, by_keys: bool = False) -> list[Call]:
    """A call on each set of operands, as dispatched."""
    made: list[Call] = []
    for one in trial.sets:
        keywords: dict[str, Any] = {**one.lengths, **trial.keywords, "out": one.out}
        v: torch.Tensor = one.v
        if by_keys:
            v = values.by_keys(v, one.k.shape[2]).transpose(1, 2).contiguous().transpose(1, 2)
            keywords["v_layout"] = "keys"
        made.append(partial(warploom.attention, one.q, one.k, v, **keywords))
    return made

"""Attention's forward pass beside cuDNN, FlashAttention 2 to 4, and flex_attention in Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import warploom
from benchmarks.families import Asked, Case, Group
from benchmarks.peers._attention import (
    ABSENCES,
    DIMENSION,
    GRID,
    GROUPS,
    PEERS,
    TITLES,
    Attention,
    Operands,
    Pass,
    sets,
)
from benchmarks.peers._flash import flash3, flash4, refusing, sdpa
from benchmarks.peers._triton import compiled
from benchmarks.protocol import Contender, Floor
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_forward import reference
from warploom.runtime.measure import Call

Peer = Callable[[Attention, Operands], torch.Tensor]
_CHECKED_ROWS = 256  # of a sequence, at its end, held against float64


def cases(group: str, _asked: Asked) -> Iterator[Case]:
    """A cell for each problem of a group."""
    for problem in GROUPS[group]():
        about = problem.record("forward", 2)
        make = partial(contenders, problem)
        yield Case(f"{problem.name} forward", about, Floor.of(about["flops"]), make)


def contenders(problem: Attention, asked: Asked) -> list[Contender]:
    """Warploom as dispatched, its peers, and each kernel that competes and computes the same."""
    given, operation = sets(problem, asked.device), AttentionOperation(**problem.operation)
    fitting = [spec for spec in asked.specs if spec.operation == operation]
    return [
        ours(problem, given),
        *(_peer(name, problem, given) for name in asked.peers or FAMILY.peers if name in _PEERS),
        *(ours(problem, given, spec.name, spec) for spec in fitting),
    ]


def ours(
    problem: Attention,
    given: Sequence[Operands],
    name: str = "warploom",
    spec: KernelSpec | None = None,
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel."""
    keywords: list[dict[str, Any]] = [
        {**problem.keywords, **one.lengths, "out": one.out, "spec": spec} for one in given
    ]
    calls = [
        partial(warploom.attention, one.q, one.k, one.v, **told)
        for one, told in zip(given, keywords, strict=True)
    ]

    def told() -> tuple[str, str]:
        one = given[0]
        found = warploom.explain(warploom.plan_attention(one.q, one.k, one.v, **keywords[0]))
        return found.kernel, found.reason

    return Contender(name, calls, lambda: error_share(problem, given[0], given[0].out), told)


def _peer(word: str, problem: Attention, given: Sequence[Operands]) -> Contender:
    name, call = FAMILY.peers[word], _PEERS[word]()
    bound = refusing(name, call)

    def share() -> float:  # what was timed is the graph's memory
        return error_share(problem, given[0], bound(problem, given[0]))

    calls: list[Call] = [partial(bound, problem, one) for one in given]
    return Contender(name, calls, share, peer=True)


def _flex() -> Peer:
    """torch's flex_attention, compiled to Triton."""
    from torch.nn.attention import flex_attention as flex

    attend = compiled(lambda: flex.flex_attention)
    masks: list[Any] = []

    def visible(
        _batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return column <= row

    def call(problem: Attention, one: Operands) -> torch.Tensor:
        if problem.window is not None or problem.lengths:
            raise RuntimeError("triton: one causal mask and one length here")
        if not masks:
            seq, device = problem.seq, str(one.q.device)
            mask = partial(flex.create_block_mask, visible, None, None, seq, seq, device)
            masks.append(mask() if problem.causal else None)
        grouped = problem.heads != problem.kv_heads
        return attend(one.q, one.k, one.v, block_mask=masks[0], enable_gqa=grouped)

    return call


_PEERS: dict[str, Callable[[], Peer]] = {
    "cudnn": lambda: partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "fa3": lambda: flash3,
    "fa4": lambda: flash4,
    "triton": _flex,
}


def error_share(problem: Attention, one: Operands, out: torch.Tensor) -> float:
    """Return the largest error of the last rows as a share of what is allowed.

    Allowed is twice the largest error of the plain torch expression in the same type, plus one
    ulp. Checked are the last rows of one batch, or of the longest sequence, which attend to the
    most columns, and all of the output for NaN.
    """
    if not out.isfinite().all():
        return float("inf")
    tensors = (one.q, one.k, one.v, out)
    if problem.lengths:
        ends = [t[problem.longest].transpose(0, 1)[None] for t in tensors]
    else:
        ends = [t[-1:] for t in tensors]
    rows = slice(max(0, ends[0].shape[2] - _CHECKED_ROWS), ends[0].shape[2])
    call, masked = problem.masked(ends[0][:, :, rows], ends[1], ends[2])
    exact, _ = reference.of_call(call, masked, reference.exact)
    plain, _ = reference.of_call(call, masked, reference.plain)
    allowed = 2 * float((plain.double() - exact).abs().max())
    allowed += reference.ulp(out.dtype, float(exact.abs().max()))
    return float((ends[3][:, :, rows].double() - exact).abs().max()) / allowed


FAMILY = Pass(
    name="attention_forward",
    kinds={"bf16": "Attention forward, bf16"},
    peers={**PEERS, "triton": "Triton"},
    groups={
        name: Group(TITLES[name], partial(cases, name), DIMENSION if name in GRID else "")
        for name in GROUPS
    },
    absences=ABSENCES,
)

"""Gradients of attention beside those of cuDNN and FlashAttention 2 to 4; and both passes together.

Five products where the forward pass has two. Where all are deterministic, Warploom as it is
otherwise comes last, and no CUDA graph is timed: peers' passes cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case, Group
from benchmarks.peers import _options
from benchmarks.peers._attention import (
    ABOUT,
    ABSENCES,
    DIMENSION,
    DRAWN,
    GRID,
    GROUPS,
    LISTED,
    TITLES,
    Operands,
    Pass,
    squares,
)
from benchmarks.peers._attention import drawn as drawn_cases
from benchmarks.peers._attention_baseline import Forward, Start
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._gradients import Backward, Step, error_share, prepared, room, steps
from benchmarks.peers._libraries import BACKWARD, BESIDE_DRAWN, NAMES, TRAINED
from benchmarks.peers._options_problem import WITHOUT
from benchmarks.peers.libraries import refusing
from benchmarks.samplers import enqueued, stepped
from warploom.generator.configurations import cells
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward.call import BackwardCall, attention_backward
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.measure import Call, graph_sampler


def cases(groups: tuple[str, ...], deterministic: bool, _asked: Asked) -> Iterator[Case]:
    """A cell for each problem of some groups."""
    sampler = enqueued if deterministic else graph_sampler
    for problem in (problem for group in groups for problem in GROUPS[group]()):
        about = problem.record("backward", 5)
        make = partial(contenders, problem, deterministic=deterministic)
        name, least = f"{problem.name} backward", Floor.of(about["flops"])
        yield Case(name, about, least, make, sampler, gradients=True)


def contenders(
    problem: Attention, asked: Asked, *, deterministic: bool = False, drawn: bool = False
) -> list[Contender]:
    """Warploom as dispatched, its peers, and each kernel that competes and computes the same."""
    given = steps(problem, asked.device, once=drawn)
    wanted = AttentionBackwardOperation(**problem.operation, deterministic=deterministic)
    fitting = [spec for spec in asked.specs if spec.operation == wanted]
    if drawn and not asked.peers:
        asked = replace(asked, peers=BESIDE_DRAWN)
    found = [
        ours(given, deterministic=deterministic),
        *(peer(*BACKWARD[word], given, deterministic=deterministic) for word in _words(asked)),
        *(ours(given, spec.name, spec, deterministic=deterministic) for spec in fitting),
    ]
    return [*found, ours(given, "warploom, in any order")] if deterministic else found


def autograd(_asked: Asked) -> Iterator[Case]:
    """Both passes, with host time: the short squares, and one sequence of each length alone."""
    lengths, heads = cells()["attention_backward"]["autograd"]["seq"], LISTED["hidden"] // 128
    alone = [
        Attention(f"d128 causal {seq} x 1", 1, heads, heads, seq, 128, causal=True)
        for seq in lengths
    ]
    for problem in (*(one for one in squares() if one.seq in lengths), *alone):
        about = problem.record("forward and backward", 7)
        make = partial(trained, problem)
        yield Case(problem.name, about, Floor.of(about["flops"]), make, stepped, gradients=True)


def trained(problem: Attention, asked: Asked) -> list[Contender]:
    """Warploom and its peers through autograd."""
    given = steps(problem, asked.device)
    return [
        _trained("warploom", _ours_trained, given),
        *(_trained(*TRAINED[word], given, peer=True) for word in _words(asked)),
    ]


def _words(asked: Asked) -> list[str]:
    return [word for word in BACKWARD if not asked.peers or word in asked.peers]


# ---- Contenders ----------------------------------------------------------------------------------


def ours(
    given: Sequence[Step],
    name: str = "warploom",
    spec: KernelSpec | None = None,
    *,
    deterministic: bool = False,
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel, which has its own room."""
    options: dict[str, Any] = {"deterministic": deterministic, "backward_spec": spec}
    gradients = [one.into if spec is None else room(one.given) for one in given]

    def prepare(one: Step, into: Gradients) -> Backward:
        q, k, v = one.given.q, one.given.k, one.given.v
        with torch.no_grad():
            out, lse = warploom.attention(q, k, v, return_lse=True, **one.arguments)
        call = Arguments(q, k, v, **one.arguments, **options)
        return partial(attention_backward, BackwardCall(call, out, lse, one.dout, None, into))

    def told() -> tuple[str, str]:
        one = given[0].given
        plan = warploom.plan_attention(one.q, one.k, one.v, **given[0].arguments, **options)
        found = warploom.explain(plan)
        return found.backward or "", found.gradients.reason if found.gradients else ""

    calls: list[Call] = [
        prepared(partial(prepare, one, into)) for one, into in zip(given, gradients, strict=True)
    ]
    return Contender(name, calls, lambda: error_share(given[0], gradients[0]), told)


def peer(name: str, start: Start, given: Sequence[Step], *, deterministic: bool) -> Contender:
    """A library on each set of operands; one that is missing says so when it is called."""
    first = refusing(name, start)
    calls = [prepared(partial(first, one, deterministic)) for one in given]
    # What was timed is the graph's memory: the gradients that are checked are new ones.
    share = partial(_share, given[0], calls[0])
    return Contender(name, calls, share, peer=True)


def _trained(
    name: str, forward: Forward, given: Sequence[Step], *, peer: bool = False
) -> Contender:
    """Forward and backward pass through autograd, as a training step has them."""
    attend = refusing(name, forward)

    def step(one: Step, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        q, k, v = leaves
        out = attend(one.problem, Operands(q, k, v, q, {}))
        return torch.autograd.grad(out, leaves, one.dout)

    calls = [partial(step, one, one.leaves) for one in given]
    return Contender(name, calls, partial(_share, given[0], calls[0]), peer=peer)


def _share(one: Step, call: Callable[[], Sequence[torch.Tensor]]) -> float:
    return error_share(one, call())


def _ours_trained(problem: Attention, one: Operands) -> torch.Tensor:
    return warploom.attention(one.q, one.k, one.v, causal=problem.causal)


def _groups() -> Iterator[tuple[str, Group]]:
    """Each set of cells in any order, and in one that does not change from run to run."""
    for name in GRID:
        made = partial(cases, (name,), False)
        yield name, Group(TITLES[name], made, DIMENSION, about=ABOUT[name])
    title = "{kind}, deterministic"
    yield "deterministic", Group(title, partial(cases, GRID, True))
    for name in (name for name in GROUPS if name not in GRID):
        title = TITLES[name]
        yield name, Group(title, partial(cases, (name,), False))
        same = partial(cases, (name,), True)
        yield f"{name}_deterministic", Group(f"{title}, deterministic", same)
    sampled = partial(drawn_cases, "backward", 5, contenders)
    yield "drawn", Group(f"{{kind}}, {DRAWN}", sampled)
    title = "Attention forward and backward, bf16, by autograd, host time included"
    yield "autograd", Group(title, autograd)
    title = f"Attention forward and backward, bf16, {_options.TITLE}"
    yield "options", Group(title, partial(_options.cases, both=True))


FAMILY = Pass(
    name="attention_backward",
    kinds={kind: f"Attention backward, {kind}" for kind in ("bf16", "fp16")},
    called={
        "warploom, in any order": "Warploom, not deterministic",
        WITHOUT: "Warploom without",
    },
    absences={
        **ABSENCES,
        "torch has no deterministic one": "torch has no deterministic one",
        "not supported for hdim 256": "not deterministic at head dimension 256",
    },
    groups=dict(_groups()),
    peers={word: NAMES[word] for word in (*BACKWARD, "efficient", "triton")},
)

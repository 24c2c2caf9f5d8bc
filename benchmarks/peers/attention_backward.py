"""Gradients of attention beside those of cuDNN and FlashAttention 2 to 4; and both passes together.

Five products where the forward pass has two. Where all are deterministic, Warploom as it is
otherwise comes last, and no CUDA graph is timed: peers' passes cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.families import Asked, Case, Group
from benchmarks.peers import _autograd, _options
from benchmarks.peers._attention import (
    ABSENCES,
    BESIDE_DRAWN,
    DIMENSION,
    DRAWN,
    GRID,
    GROUPS,
    LISTED,
    PEERS,
    TITLES,
    Pass,
    squares,
)
from benchmarks.peers._attention import drawn as drawn_cases
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._gradients import ours, peer, steps
from benchmarks.samplers import enqueued, stepped
from warploom.generator.configurations import cells
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.measure import graph_sampler


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
        *(peer(word, name, given, deterministic=deterministic) for word, name in _peers(asked)),
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
    words = [("warploom", "warploom"), *_peers(asked)]
    return [_autograd.contender(word, name, given) for word, name in words]


def _peers(asked: Asked) -> list[tuple[str, str]]:
    return [pair for pair in PEERS.items() if not asked.peers or pair[0] in asked.peers]


def _groups() -> Iterator[tuple[str, Group]]:
    """Each set of cells in any order, and in one that does not change from run to run."""
    for name in GRID:
        yield name, Group(TITLES[name], partial(cases, (name,), False), DIMENSION)
    title = "{kind}, deterministic"
    yield "deterministic", Group(title, partial(cases, GRID, True))
    for name in (name for name in GROUPS if name not in GRID):
        title = TITLES[name]
        yield name, Group(title, partial(cases, (name,), False))
        same = partial(cases, (name,), True)
        yield f"{name}_deterministic", Group(f"{title}, deterministic", same)
    made = partial(drawn_cases, "backward", 5, contenders)
    yield "drawn", Group(f"{{kind}}, {DRAWN}", made)
    title = "Attention forward and backward, bf16, by autograd, host time included"
    yield "autograd", Group(title, autograd)
    title = f"Attention forward and backward, bf16, {_options.TITLE}"
    yield "options", Group(title, partial(_options.cases, both=True))


FAMILY = Pass(
    name="attention_backward",
    kinds={kind: f"Attention backward, {kind}" for kind in ("bf16", "fp16")},
    called={"warploom, in any order": "Warploom, not deterministic"},
    absences={
        **ABSENCES,
        "torch has no deterministic one": "torch has no deterministic one",
        "not supported for hdim 256": "not deterministic at head dimension 256",
    },
    groups=dict(_groups()),
    peers={**PEERS, **_options.NAMES},
)

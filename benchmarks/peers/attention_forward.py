"""Attention's forward pass beside cuDNN, FlashAttention 2 to 4, and flex_attention in Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case, Group
from benchmarks.peers import _attention_eight_bits, _options
from benchmarks.peers._attention import (
    ABOUT,
    ABSENCES,
    DIMENSION,
    DRAWN,
    GRID,
    GROUPS,
    TITLES,
    Operands,
    Pass,
    masked,
    sequence,
    sets,
)
from benchmarks.peers._attention import drawn as drawn_cases
from benchmarks.peers._attention_baseline import Forward
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._libraries import BESIDE_DRAWN, EIGHT_BITS, FORWARD, NAMES
from benchmarks.peers._options_problem import WITHOUT
from benchmarks.peers.libraries import refusing
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families._attention import reference
from warploom.runtime.measure import Call

_CHECKED_ROWS = 256  # of a sequence, at its end, held against float64


def cases(group: str, _asked: Asked) -> Iterator[Case]:
    """A cell for each problem of a group."""
    for problem in GROUPS[group]():
        about = problem.record("forward", 2)
        make = partial(contenders, problem)
        yield Case(f"{problem.name} forward", about, Floor.of(about["flops"]), make)


def contenders(problem: Attention, asked: Asked, *, drawn: bool = False) -> list[Contender]:
    """Warploom as dispatched, its peers, and each kernel that competes and computes the same."""
    given = sets(problem, asked.device, once=drawn)
    operation = AttentionOperation(**problem.operation)
    fitting = [spec for spec in asked.specs if spec.operation == operation]
    wanted = cache(partial(expected, problem, given[0]))
    words = asked.peers or (BESIDE_DRAWN if drawn else FORWARD)
    return [
        ours(problem, given, wanted),
        *(_peer(*FORWARD[word], problem, given, wanted) for word in words if word in FORWARD),
        *(ours(problem, given, wanted, spec) for spec in fitting),
    ]


def ours(
    problem: Attention,
    given: Sequence[Operands],
    wanted: Callable[[], Expected],
    spec: KernelSpec | None = None,
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel, into its own output."""
    outs = [one.out if spec is None else torch.full_like(one.out, torch.nan) for one in given]
    keywords: list[dict[str, Any]] = [
        {**problem.keywords, **one.lengths, "out": out, "spec": spec}
        for one, out in zip(given, outs, strict=True)
    ]
    calls = [
        partial(warploom.attention, one.q, one.k, one.v, **told)
        for one, told in zip(given, keywords, strict=True)
    ]

    def told() -> tuple[str, str]:
        one = given[0]
        found = warploom.explain(warploom.plan_attention(one.q, one.k, one.v, **keywords[0]))
        return found.kernel, found.reason

    name = spec.name if spec else "warploom"
    return Contender(name, calls, lambda: error_share(problem, outs[0], wanted()), told)


def _peer(
    name: str,
    make: Callable[[], Forward],
    problem: Attention,
    given: Sequence[Operands],
    wanted: Callable[[], Expected],
) -> Contender:
    bound = refusing(name, make())

    def share() -> float:  # what was timed is the graph's memory
        return error_share(problem, bound(problem, given[0]), wanted())

    calls: list[Call] = [partial(bound, problem, one) for one in given]
    return Contender(name, calls, share, peer=True)


@dataclass(frozen=True, slots=True)
class Expected:
    """What is right of the rows that are checked, [1, heads, rows, dim], and how far off is."""

    exact: torch.Tensor
    allowed: float


def expected(problem: Attention, one: Operands) -> Expected:
    """Compute the last rows of one batch, or of the longest sequence, in float64.

    They attend to the most columns. Allowed is twice the largest error of the plain torch
    expression in the same type, plus one ulp.
    """
    q = sequence(problem, one.q)[:, :, -_CHECKED_ROWS:]
    k, v = (sequence(problem, t, keys=True) for t in (one.k, one.v))
    call, bounds = masked(problem, q, k, v)
    exact, _ = reference.of_call(call, bounds, reference.exact)
    plain, _ = reference.of_call(call, bounds, reference.plain)
    allowed = 2 * float((plain.double() - exact).abs().max())
    return Expected(exact, allowed + reference.ulp(q.dtype, float(exact.abs().max())))


def error_share(problem: Attention, out: torch.Tensor, wanted: Expected) -> float:
    """Return the largest error of the last rows as a share of what is allowed; NaN is infinite."""
    if not out.isfinite().all():
        return float("inf")
    found = sequence(problem, out)[:, :, -_CHECKED_ROWS:].double()
    return float((found - wanted.exact).abs().max()) / wanted.allowed


_EIGHT_BITS = {word: name for word, (name, _) in EIGHT_BITS.items()}
FAMILY = Pass(
    name="attention_forward",
    kinds={kind: f"Attention forward, {kind}" for kind in ("bf16", "fp16", "e4m3", "int8")},
    peers={**NAMES, **_EIGHT_BITS},
    groups={
        **{
            name: Group(
                *(TITLES[name], partial(cases, name), DIMENSION if name in GRID else ""),
                about=ABOUT.get(name, ""),
            )
            for name in GROUPS
        },
        "drawn": Group(f"{{kind}}, {DRAWN}", partial(drawn_cases, "forward", 2, contenders)),
        "eight_bits": Group(
            f"{{kind}}, {_attention_eight_bits.TITLE}", _attention_eight_bits.cases
        ),
        "options": Group(f"{{kind}}, {_options.TITLE}", partial(_options.cases, both=False)),
    },
    called={
        WITHOUT: "Warploom without",
        _attention_eight_bits.LAID_OUT: "Warploom, v by keys",
        _attention_eight_bits.QUANTIZING: "Warploom, quantized in each call",
        **{
            f"{name}, quantized": f"{name}, quantized in each call" for name in _EIGHT_BITS.values()
        },
    },
    absences=ABSENCES,
)

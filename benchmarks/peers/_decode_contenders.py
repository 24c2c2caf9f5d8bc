"""Contenders of a decode attention: Warploom, its peers in every layout that they take, variants.

Warploom's keys are contiguous; what it takes with pages, with fixed chunks, and in bf16 beside a
cache of 8 bits, stands beside it. Peers compete by the layout that suits them best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked
from benchmarks.peers._checked import tried
from benchmarks.peers._decode_problem import Call, Decode, Given, Way
from benchmarks.peers._libraries import DECODE
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender
from warploom.runtime.measure import Call as Timed
from warploom.runtime.measure import Sampler, graph_sampler


@dataclass(frozen=True)
class Ours:
    """Warploom: as dispatched, with what else a call may ask for, or by one kernel."""

    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, given: Given, page: int) -> Call:
        """A call on each set of buffers, into a result of its own, full of NaN before."""
        calls = [
            partial(warploom.attention_decode, *tensors, **keywords)
            for tensors, keywords in self.arguments(given, page)
        ]
        return lambda index: calls[index]().transpose(1, 2)

    def arguments(
        self, given: Given, page: int
    ) -> list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
        """q, k and v of each set, and all else."""
        keywords: dict[str, Any] = {"cache_seqlens": given.lengths, **self.keywords}
        if page:
            keywords["page_table"] = given.table(page)
        if given.cache == "e4m3":
            keywords |= dict(zip(("scale_k", "scale_v"), given.scales, strict=True))
        outs = [torch.full_like(given.q, torch.nan) for _ in range(given.sets)]
        return [
            (
                tuple(one.transpose(1, 2) for one in (given.q, k, v)),
                {**keywords, "out": out.transpose(1, 2)},
            )
            for (k, v), out in zip(given.caches(page), outs, strict=True)
        ]

    def told(self, given: Given, page: int) -> tuple[str, str]:
        """The kernel, and what decided on it."""
        tensors, keywords = self.arguments(given, page)[0]
        found = warploom.explain(warploom.attention_decode, *tensors, **keywords)
        return found.kernel, found.reason


OURS = Way("warploom", Ours())
BESIDE = (
    Way("warploom", Ours(), page=16),
    Way("warploom", Ours(), page=64),
    Way("warploom, batch_invariant", Ours({"batch_invariant": True})),
)


def contenders(problem: Decode, asked: Asked) -> list[Contender]:
    """Warploom as dispatched, its peers, what it takes otherwise, and kernels that compete."""
    return list(_contenders(problem, asked))


def _contenders(problem: Decode, asked: Asked) -> Iterator[Contender]:
    given = Given(problem, asked.device)
    yield contender(given, OURS)
    for word, ways in DECODE.items():
        for way in ways:
            if way.cache == problem.cache and (not asked.peers or word in asked.peers):
                yield contender(given, way, peer=True)
    for way in BESIDE:
        yield contender(given, way)
    if problem.cache != "bf16":
        yield contender(Given(problem, asked.device, "bf16"), Way("warploom, bf16", Ours()))
    for spec in _competing(asked.specs):
        yield contender(given, Way(spec.name, Ours({"spec": spec})))


def _competing(specs: Sequence[KernelSpec]) -> Iterator[KernelSpec]:
    """Kernels of the family; one for another cell says so."""
    return (one for one in specs if one.operation.family == "attention_decode")


class Product:
    """A call on one set of buffers; `out` has its last result.

    Lengths may be others when it is captured, `before`, than when it is timed, `after`.
    """

    def __init__(self, call: Call, index: int, given: Given, captured: int = 0) -> None:
        self.call, self.index, self.out = call, index, torch.empty(0)
        self.lengths, self.after = given.lengths, given.problem.keys
        self.before = captured or self.after

    def __call__(self) -> None:
        self.out = self.call(self.index)


def contender(given: Given, way: Way, *, peer: bool = False, captured: int = 0) -> Contender:
    """A call for each set of buffers; or why there is none."""

    def make() -> list[Product]:
        call = way.make(given, way.page)
        return [Product(call, index, given, captured) for index in range(given.sets)]

    def error_share(products: Sequence[Product]) -> float:
        results = torch.cat([one.out for one in products])
        return given.right(way.page, eight=way.eight).share(results)

    ours = way.make
    if not isinstance(ours, Ours):
        return tried(way.called, make, error_share, peer=peer)
    explain = partial(ours.told, given, way.page)
    return tried(way.called, make, error_share, lambda _first: explain(), peer=peer)


# ---- One graph for all lengths -------------------------------------------------------------------


def replayed_contenders(problem: Decode, captured: int, asked: Asked) -> list[Contender]:
    """A graph that was captured at few keys, and replayed at all; beside one captured there.

    Each has lengths of its own.
    """
    there = f"warploom, captured at {problem.keys} keys"
    return [
        contender(Given(problem, asked.device), OURS, captured=captured),
        contender(Given(problem, asked.device), Way(there, Ours()), peer=True),
    ]


def replayed(calls: Sequence[Timed]) -> Sampler:
    """Capture at few keys, and return what times replays at all of them."""
    first = calls[0]
    if not isinstance(first, Product):  # it refuses
        return graph_sampler(calls)
    first.lengths.fill_(first.before)
    sample = graph_sampler(calls)
    first.lengths.fill_(first.after)
    return sample

"""Routing of tokens to experts, compared with torch's operations that do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from benchmarks.peers._routing import sorted_by_expert
from warploom.generator.configurations import cells
from warploom.generator.families.route import RouteOperation, RouteShape
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.route import reference
from warploom.runtime.families.route.api import route
from warploom.runtime.families.route.call import RouteCall
from warploom.runtime.families.route.family import FAMILY as RUNTIME
from warploom.runtime.families.route.reference import Results
from warploom.runtime.trial import generator

OPERATION = RouteOperation("int64")  # ids as torch's topk returns them
BYTES = 16  # of a pair: its id, and where it is in both results


def cases(asked: Asked) -> Iterator[Case]:
    """The routers of the models whose layers `combine` measures, at each number of tokens."""
    listed = cells()["combine"]["layers"]
    for model, (_, _, experts, k) in listed["models"].items():
        for tokens in asked.m or listed["tokens"]:
            shape = RouteShape(tokens, k, experts)
            moved = tokens * k * BYTES + 4 * experts
            problem = {"m": tokens, "model": model, "type": "int64"}
            floor = Floor.of(0.0, moved)
            name = f"{model} {tokens} tokens, {k} of {experts} experts"
            yield Case(name, problem, floor, partial(contenders, shape, moved))


def contenders(shape: RouteShape, moved: int, asked: Asked) -> list[Contender]:
    """Warploom as dispatched, torch, and each kernel that competes and computes the same."""
    make = partial(RUNTIME.draw, OPERATION, shape, asked.device, generator(asked.device, 0))
    return moving(make, moved, OPERATION, asked, ours=ours, torchs=torchs, error_share=wrong)


def ours(one: RouteCall) -> Results:
    """Warploom."""
    return route(one.ids, one.experts, spec=one.spec)


def wrong(one: RouteCall, call: Callable[[], Results]) -> float:
    """0 where a call on these ids returns what it must, else infinity."""
    return RUNTIME.share(call(), reference.route(one.ids, one.experts, 0))


def torchs(given: Sequence[RouteCall]) -> Contender:
    """torch's stable sort, histogram, cumulative sum and scatter, as transformers has them."""
    calls = [partial(steps, one) for one in given]
    return Contender("torch", calls, lambda: wrong(given[0], calls[0]), peer=True)


def steps(one: RouteCall) -> Results:
    """The same types as ours, by torch."""
    offsets, order, inverse = sorted_by_expert(one.ids, one.experts)
    return offsets, order.to(torch.int32), inverse.to(torch.int32).view(one.ids.shape)


class Routers(Family):
    """Routing of tokens to experts."""

    def subject(self, problem: Problem) -> str:
        """The model."""
        return str(problem["model"])


FAMILY = Routers(
    name="route",
    groups={"routers": Group("Routing of tokens to experts", cases, listed=True)},
    grid=(),
    kinds={"int64": "Routing of tokens to experts"},
    peers={"torch": "torch"},
    called={"torch": "torch's sort, histc and cumsum"},
    axis=("tokens", "tokens"),
    divided="model",
)

"""Attention with dropout, masks, biases, ALiBi, sinks or lists of blocks, as it is measured.

The forward pass, and both passes through autograd as a training step has them. Beside its peers
each cell has Warploom on the same operands without the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._attention_baseline import Attend
from benchmarks.peers._libraries import OPTIONS
from benchmarks.peers._options_given import Given, Shared, Tensors
from benchmarks.peers._options_problem import WITHOUT, Option, options
from benchmarks.peers.libraries import refusing
from benchmarks.protocol import rotated
from benchmarks.samplers import replayed
from warploom.generator.specification import parse_name
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.philox import drawn

BESIDE = {  # by the list of a cell: those that have what it asks for, or might
    "dropout": ("cudnn", "fa2", "efficient"),
    "scores": ("cudnn", "efficient", "triton"),
    "alibi": ("cudnn", "fa2", "efficient", "triton"),
    "sinks": ("fa4", "triton"),
    "blocks": ("triton",),
}
TITLE = "dropout, masks, biases, ALiBi, sinks and block masks"


def cases(asked: Asked, *, both: bool) -> Iterator[Case]:
    """A cell of each option, of the forward pass or of both."""
    passed, products = ("both passes", 7) if both else ("forward", 2)
    for problem in options(both=both):
        about = problem.record(passed, products)
        least = Floor.of(about["flops"], problem.attention.moved * products // 2)
        make = partial(contenders, problem, both=both)
        yield Case(f"{problem.name}, {passed}", about, least, make, replayed, gradients=both)


def contenders(problem: Option, asked: Asked, *, both: bool) -> list[Contender]:
    """Warploom, its peers, Warploom without the option, and kernels that compute the same."""
    shared = Shared(problem, asked.device)
    given = rotated(partial(Given, shared), problem.attention.moved, asked.device)
    words = [word for word in BESIDE[problem.listed] if not asked.peers or word in asked.peers]
    without = Shared(Option(problem.attention), asked.device)
    alone = [Given(without, one) for one in given]
    found = [
        ours(given, both=both),
        *(peer(*OPTIONS[word], given, both=both) for word in words),
        ours(alone, WITHOUT, both=both),
    ]
    if asked.specs:
        planned = parse_name(_explained(given[0])[1 if both else 0]).operation
        keyword = "backward_spec" if both else "spec"
        fitting = (spec for spec in asked.specs if spec.operation == planned)
        found += [ours(given, one.name, both=both, **{keyword: one}) for one in fitting]
    return found


class Run:
    """A call on one set of operands; `found` has its last results, the output or gradients."""

    def __init__(self, one: Given, attend: Attend, *, both: bool) -> None:
        self.one, self.attend, self.both = one, attend, both
        self.tensors = one.leaves() if both else one.tensors
        self.found: Sequence[torch.Tensor] = ()

    def __call__(self) -> None:
        self.found = ()
        out = self.attend(self.one, self.tensors)
        self.found = (out,)
        if self.both:
            self.found = torch.autograd.grad(out, list(self.tensors.values()), self.one.dout)


class Ours:
    """Warploom; of dropout, `state` has what was drawn in the last call."""

    def __init__(self, one: Given, *, both: bool, **told: Any) -> None:
        into = {} if both else {"out": torch.full_like(one.one.out, torch.nan)}
        self.told = {**one.shared.told, **into, **told}
        self.state: torch.Tensor | None = None

    def __call__(self, one: Given, tensors: Tensors) -> torch.Tensor:
        told = dict(self.told)
        if one.problem.dropout_p:  # as a call without a state draws one
            told["dropout_state"] = self.state = drawn(one.one.q.device)
        given: dict[str, Any] = {**tensors, **told}
        found: torch.Tensor = warploom.attention(**given)
        return found


def ours(given: Sequence[Given], name: str = "warploom", *, both: bool, **told: Any) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel."""
    attends = [Ours(one, both=both, **told) for one in given]
    runs = [Run(one, own, both=both) for one, own in zip(given, attends, strict=True)]

    def share() -> float:  # of what was timed
        return given[0].share(runs[0].found, both=both, state=attends[0].state)

    def chosen() -> tuple[str, str]:
        forward, backward, *reasons = _explained(given[0])
        # Two kernels are no measurement of either.
        return (f"{forward}, {backward}", reasons[1]) if both else (forward, reasons[0])

    return Contender(name, runs, share, chosen)


def _explained(one: Given) -> tuple[str, str, str, str]:
    """The kernels of both passes, and what decided on each."""
    tensors: dict[str, Any] = {**one.leaves(), **one.shared.told}
    found = warploom.explain(warploom.plan_attention(**tensors))
    reason = found.gradients.reason if found.gradients else ""
    return found.kernel, found.backward or "", found.reason, reason


def peer(name: str, make: Callable[[], Attend], given: Sequence[Given], *, both: bool) -> Contender:
    """A library on each set of operands; one that is missing says so when it is called."""
    attend = refusing(name, make())
    runs = [Run(one, attend, both=both) for one in given]

    def share() -> float:
        if given[0].problem.dropout_p:
            return mean_share(given[0], attend, both=both)
        return given[0].share(runs[0].found, both=both, state=None)

    return Contender(name, runs, share, peer=True)


def mean_share(one: Given, attend: Attend, *, both: bool) -> float:
    """How far off the output's mean is where v is 1, or that of v's gradient where the output's is.

    Both are 1 where as many weights are dropped as kept ones are scaled for.
    """
    tensors = one.leaves() if both else one.tensors
    if not both:
        out = attend(one, {**tensors, "v": torch.ones_like(tensors["v"])})
        return one.mean_share(out.float().mean())
    out = attend(one, tensors)
    (dv,) = torch.autograd.grad(out, [tensors["v"]], torch.ones_like(out))
    return one.mean_share(dv.float().mean())

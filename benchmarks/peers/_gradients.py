"""A backward pass to be measured: operands, Warploom's and its peers' calls, and the check.

A peer's backward pass follows its own forward pass, which is run once, before anything is timed.
Those of torch and of FlashAttention-4 are asked for through autograd, that of FlashAttention-3
through its operator. Asked to be deterministic, a peer that cannot is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

import warploom
from benchmarks.peers._attention import Operands, masked, sequence, sets
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._flash import (
    cudnn,
    flash2,
    flash3_keywords,
    flash3_operators,
    flash4,
    refusing,
    turned,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families._attention.reference import ulp
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.call import BackwardCall, attention_backward
from warploom.runtime.families.attention_backward.reference import Gradients, Tensors
from warploom.runtime.measure import Call

Backward = Callable[[], Sequence[torch.Tensor]]  # dq, dk and dv, as q, k and v lie


@dataclass
class Step:
    """The operands of a forward pass, the gradient of its result, and where gradients go."""

    problem: Attention
    given: Operands
    dout: torch.Tensor
    into: Gradients

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Fresh q, k and v of which gradients are wanted, on the memory of the operands."""
        return [t.detach().requires_grad_() for t in (self.given.q, self.given.k, self.given.v)]

    @property
    def arguments(self) -> dict[str, Any]:
        """What Warploom's attention is given beside tensors."""
        return {**self.problem.keywords, **self.given.lengths}

    @cached_property
    def wanted(self) -> tuple[Gradients, Gradients]:
        """The gradients of what is checked, in float64 and by the plain torch expression."""
        zeros = torch.zeros(())  # neither of the two looks at results of a forward pass
        q, k, v, dout = self.part((self.given.q, self.given.k, self.given.v, self.dout))
        given = Tensors(q, k, v, zeros, zeros, dout)
        call, bounds = masked(self.problem, q, k, v)
        function = Function(call.scaling, bounds)
        return reference.exact(given, function), reference.plain(given, function)

    def part(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is checked of q, k, v and what else is of rows of q: the first group of heads.

        It is that of the last batch, or of the longest sequence. Results are [1, heads, seq, dim];
        those of queries have all heads that share the keys.
        """
        group = self.problem.heads // self.problem.kv_heads
        found = []
        for index, tensor in enumerate(tensors):
            keys = index in (1, 2)
            found.append(sequence(self.problem, tensor, keys=keys)[:, : 1 if keys else group])
        return found


def steps(problem: Attention, device: str, *, once: bool = False) -> list[Step]:
    """Random operands, a gradient, and room full of NaN for those of q, k and v, for each set."""
    return [
        Step(problem, one, torch.randn_like(one.q), _room(one))
        for one in sets(problem, device, once=once)
    ]


def _room(one: Operands) -> Gradients:
    dq, dk, dv = (torch.full_like(tensor, torch.nan) for tensor in (one.q, one.k, one.v))
    return dq, dk, dv


def prepared(prepare: Callable[[], Backward]) -> Backward:
    """Return a call that runs the forward pass the first time, and then the backward pass only."""
    found: list[Backward] = []

    def call() -> Sequence[torch.Tensor]:
        if not found:
            found.append(prepare())
        return found[0]()

    return call


def error_share(one: Step, found: Sequence[torch.Tensor]) -> float:
    """Return the largest error of the gradients as a share of what is allowed of each.

    Allowed is twice the largest error of torch's autograd through the plain expression in the same
    type, plus one ulp. Checked are the gradients of one group of heads of one batch, or of the
    longest sequence, which is all that they depend on; and all of them for NaN.
    """
    if not all(gradient.isfinite().all() for gradient in found):
        return float("inf")
    shares = []
    for gradient, exact, plain in zip(one.part(found), *one.wanted, strict=True):
        allowed = 2 * float((plain.double() - exact).abs().max())
        allowed += ulp(gradient.dtype, float(exact.abs().max()))
        shares.append(float((gradient.double() - exact).abs().max()) / allowed)
    return max(shares)


# ---- Backward passes -----------------------------------------------------------------------------


def ours(
    given: Sequence[Step],
    name: str = "warploom",
    spec: KernelSpec | None = None,
    *,
    deterministic: bool = False,
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel, which has its own room."""
    options: dict[str, Any] = {"deterministic": deterministic, "backward_spec": spec}
    room = [one.into if spec is None else _room(one.given) for one in given]

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
        prepared(partial(prepare, one, into)) for one, into in zip(given, room, strict=True)
    ]
    return Contender(name, calls, lambda: error_share(given[0], room[0]), told)


def peer(word: str, name: str, given: Sequence[Step], *, deterministic: bool) -> Contender:
    """A peer on each set of operands; one that is missing says so when it is called."""
    first = refusing(name, _PEERS[word])
    calls = [prepared(partial(first, one, deterministic)) for one in given]
    # What was timed is the graph's memory: the gradients that are checked are new ones.
    return Contender(name, calls, lambda: error_share(given[0], calls[0]()), peer=True)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Have torch choose deterministic algorithms, without filling what it allocates."""
    setting: Any = torch.utils.deterministic
    before, fills = torch.are_deterministic_algorithms_enabled(), setting.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted or before, warn_only=True)
    setting.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        setting.fill_uninitialized_memory = fills


def _differentiated(
    one: Step, deterministic: bool, attend: Callable[[Attention, Operands], torch.Tensor]
) -> Backward:
    leaves = one.leaves
    q, k, v = leaves
    out = attend(one.problem, Operands(q, k, v, one.given.out, one.given.lengths))

    def call() -> Sequence[torch.Tensor]:
        with _deterministic(deterministic):
            return torch.autograd.grad(out, leaves, one.dout, retain_graph=True)

    return call


def _cudnn(one: Step, deterministic: bool) -> Backward:
    if deterministic:
        raise ValueError("torch has no deterministic one")
    return _differentiated(one, deterministic, cudnn)


def _flash3(one: Step, deterministic: bool) -> Backward:
    forward, backward = flash3_operators()
    keywords, given = flash3_keywords(one.problem, one.given), turned(one.given)
    out, lse = forward(*given, **keywords)[:2]
    packed = one.problem.lengths
    dout = one.dout if packed else one.dout.transpose(1, 2)

    def call() -> Sequence[torch.Tensor]:
        found = backward(dout, *given, out, lse, deterministic=deterministic, **keywords)[:3]
        return [t if packed else t.transpose(1, 2) for t in found]

    return call


def _flash4(one: Step, deterministic: bool) -> Backward:
    options: dict[str, Any] = {"deterministic": True} if deterministic else {}
    return _differentiated(one, deterministic, partial(flash4, **options))


_PEERS: dict[str, Callable[[Step, bool], Backward]] = {
    "cudnn": _cudnn,
    "fa2": partial(_differentiated, attend=flash2),
    "fa3": _flash3,
    "fa4": _flash4,
}

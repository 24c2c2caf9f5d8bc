"""A backward pass to be measured: its operands, and how its gradients are checked.

A backward pass follows its own forward pass, which is run once, before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.peers._attention import Operands, masked, sequence, sets
from benchmarks.peers._attention_problem import Attention
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.reference import ulp
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.reference import Gradients, Tensors

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
        Step(problem, one, torch.randn_like(one.out), room(one))
        for one in sets(problem, device, once=once)
    ]


def room(one: Operands) -> Gradients:
    """Gradients of q, k and v that nothing has written: full of NaN."""
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

"""The backward pass of an attention cell, Warploom's and its peers'; and both passes together.

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
from torch.nn.attention import SDPBackend

import warploom
from benchmarks.attention_peers import (
    Operands,
    Problem,
    flash3_operators,
    flash4,
    sdpa,
    turned,
)
from benchmarks.protocol import Contender
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Call as Arguments
from warploom.runtime.families._attention.problem import extents
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.plan import attention_backward
from warploom.runtime.families.attention_backward.problem import BackwardCall
from warploom.runtime.families.attention_backward.reference import Gradients, Tensors
from warploom.runtime.families.attention_forward import reference as attention_reference
from warploom.runtime.measure import Call

Backward = Callable[[], Sequence[torch.Tensor]]  # dq, dk and dv, as q, k and v lie
Prepare = Callable[[Problem, "Pass", bool], Backward]  # whether to be deterministic


@dataclass
class Pass:
    """The operands of a forward pass, the gradient of its result, and where gradients go."""

    problem: Problem
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
        call = Arguments(q, k, v, causal="bottom_right" if self.problem.causal else False)
        if self.problem.window is not None:
            call.window = (self.problem.window, 0)
        function = attention_reference.Function(call.scaling, None, band(call, extents(call)))
        return reference.exact(given, function), reference.plain(given, function)

    def part(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is checked of each: the first group of heads of the last batch or longest sequence.

        Its tensors are [1, heads, seq, dim]; those of queries have all heads that share the keys.
        """
        problem = self.problem
        heads = {problem.heads: problem.heads // problem.kv_heads, problem.kv_heads: 1}
        if not problem.lengths:
            return [t[-1:, : heads[t.shape[1]]] for t in tensors]
        longest = max(problem.lengths)
        first = sum(problem.lengths[: problem.lengths.index(longest)])
        rows = slice(first, first + longest)
        return [t[rows, : heads[t.shape[1]]].transpose(0, 1)[None] for t in tensors]


def passes(problem: Problem, sets: Sequence[Operands]) -> list[Pass]:
    """Make a random gradient, and room full of NaN for those of q, k and v, for each set."""
    made = []
    for one in sets:
        dq, dk, dv = (torch.full_like(t, torch.nan) for t in (one.q, one.k, one.v))
        made.append(Pass(problem, one, torch.randn_like(one.q), (dq, dk, dv)))
    return made


def prepared(prepare: Callable[[], Backward]) -> Call:
    """Return a call that runs the forward pass the first time, and then the backward pass only."""
    found: list[Backward] = []

    def call() -> Sequence[torch.Tensor]:
        if not found:
            found.append(prepare())
        return found[0]()

    return call


# ---- Backward passes -----------------------------------------------------------------------------


def ours(
    given: Sequence[Pass],
    spec: KernelSpec | None = None,
    name: str = "warploom",
    *,
    deterministic: bool = False,
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel."""
    options: dict[str, Any] = {"deterministic": deterministic, "backward_spec": spec}

    def prepare(one: Pass) -> Backward:
        q, k, v = one.given.q, one.given.k, one.given.v
        with torch.no_grad():
            out, lse = warploom.attention(q, k, v, return_lse=True, **one.arguments)
        arguments = Arguments(q, k, v, **one.arguments, **options)
        return partial(
            attention_backward, BackwardCall(arguments, out, lse, one.dout, None, one.into)
        )

    def kernel() -> str:
        one = given[0]
        plan = warploom.plan_attention(
            one.given.q, one.given.k, one.given.v, **one.arguments, **options
        )
        return warploom.explain(plan).backward or ""

    calls = [prepared(partial(prepare, one)) for one in given]
    return Contender(name, calls, lambda: error_share(given[0], given[0].into), kernel)


def peers(given: Sequence[Pass], *, deterministic: bool = False) -> list[Contender]:
    """Every peer on each set of operands; one that is missing says so when it is called."""
    return [
        _peer(name, prepare, given, deterministic)
        for name, prepare in (
            ("cuDNN", partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
            ("FlashAttention-2", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
            ("FlashAttention-3", _flash3),
            ("FlashAttention-4", _flash4),
        )
    ]


def _peer(name: str, prepare: Prepare, given: Sequence[Pass], deterministic: bool) -> Contender:
    def first(one: Pass) -> Backward:
        try:
            return prepare(one.problem, one, deterministic)
        except (ImportError, TypeError, AssertionError, NotImplementedError) as error:
            raise RuntimeError(f"{name}: {error}") from error

    calls = [prepared(partial(first, one)) for one in given]
    # What was timed is the graph's memory: the gradients that are checked are new ones.
    return Contender(name, calls, lambda: error_share(given[0], _called(calls[0])))


def _called(call: Call) -> Sequence[torch.Tensor]:
    found: Any = call()
    return found  # type: ignore[no-any-return]


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
    out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor, deterministic: bool
) -> Backward:
    def call() -> Sequence[torch.Tensor]:
        with _deterministic(deterministic):
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return call


def _sdpa(backend: SDPBackend, problem: Problem, one: Pass, deterministic: bool) -> Backward:
    if deterministic and backend is not SDPBackend.FLASH_ATTENTION:
        raise ValueError("torch has no deterministic one")
    leaves = one.leaves
    given = Operands(leaves[0], leaves[1], leaves[2], one.given.out, one.given.lengths)
    return _differentiated(sdpa(backend, problem, given), leaves, one.dout, deterministic)


def _flash3(problem: Problem, one: Pass, deterministic: bool) -> Backward:
    forward, backward = flash3_operators()
    keywords: dict[str, Any] = {"softmax_scale": problem.dim**-0.5, **one.given.lengths}
    if problem.window is None:
        keywords["is_causal"] = problem.causal
    else:
        keywords |= {"window_size_left": problem.window, "window_size_right": 0}
    given = turned(one.given)
    out, lse = forward(*given, **keywords)[:2]
    dout = one.dout if problem.lengths else one.dout.transpose(1, 2)

    def call() -> Sequence[torch.Tensor]:
        found = backward(dout, *given, out, lse, deterministic=deterministic, **keywords)[:3]
        return [t if problem.lengths else t.transpose(1, 2) for t in found]

    return call


def _flash4(problem: Problem, one: Pass, deterministic: bool) -> Backward:
    leaves = one.leaves
    given = Operands(leaves[0], leaves[1], leaves[2], one.given.out, one.given.lengths)
    out = flash4(problem, given, **({"deterministic": True} if deterministic else {}))
    return _differentiated(out, leaves, one.dout, deterministic)


# ---- Both passes through autograd ----------------------------------------------------------------

Attend = Callable[[Problem, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def trained(given: Sequence[Pass]) -> list[Contender]:
    """Forward and backward pass of each, through autograd: Warploom's first."""

    def contender(name: str, attend: Attend) -> Contender:
        def step(one: Pass, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            try:
                out = attend(one.problem, leaves[0], leaves[1], leaves[2])
            except (ImportError, TypeError, AssertionError, NotImplementedError) as error:
                raise RuntimeError(f"{name}: {error}") from error
            return torch.autograd.grad(out, leaves, one.dout)

        calls = [partial(step, one, one.leaves) for one in given]
        return Contender(name, calls, lambda: error_share(given[0], calls[0]()))

    return [
        contender("warploom", _ours),
        contender("cuDNN", _cudnn),
        contender("FlashAttention-2", _flash2),
        contender("FlashAttention-3", _Flash3.attend),
        contender("FlashAttention-4", _flash4_trained),
    ]


def _ours(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return warploom.attention(q, k, v, causal=problem.causal)


def _cudnn(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # The operators: to choose a backend by its context would be charged to the peer.
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: torch.Tensor = operator(q, k, v, None, True, 0.0, problem.causal)[0]
    return out


def _flash2(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = operator(q, k, v, 0.0, problem.causal)[0]
    return out


def _flash4_trained(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return flash4(problem, Operands(q, k, v, q, {}))


class _Flash3(torch.autograd.Function):
    """The two operators of FlashAttention-3 as its users put them together."""

    @staticmethod
    def attend(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention on [batch, heads, seq, dim]."""
        given = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: torch.Tensor = _Flash3.apply(*given, problem.causal, problem.dim**-0.5)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Keep what the backward pass takes."""
        forward, _ = flash3_operators()
        out, lse = forward(q, k, v, softmax_scale=scale, is_causal=causal)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.keywords = {"softmax_scale": scale, "is_causal": causal}
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Return dq, dk and dv."""
        _, backward = flash3_operators()
        dq, dk, dv = backward(dout, *ctx.saved_tensors, **ctx.keywords)[:3]
        return dq, dk, dv, None, None


# ---- Checking ------------------------------------------------------------------------------------


def error_share(one: Pass, found: Sequence[torch.Tensor]) -> float:
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
        allowed += attention_reference.ulp(gradient.dtype, float(exact.abs().max()))
        shares.append(float((gradient.double() - exact).abs().max()) / allowed)
    return max(shares)

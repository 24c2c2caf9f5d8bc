"""Both passes of attention through autograd, as a training step has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.peers._attention import Operands
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._flash import flash3_operators, flash4, refusing
from benchmarks.peers._gradients import Step, error_share
from warploom.runtime.contest import Contender

Attend = Callable[[Attention, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contender(word: str, name: str, given: Sequence[Step]) -> Contender:
    """Forward and backward pass of each, through autograd."""
    attend = refusing(name, _ATTEND[word])

    def step(one: Step, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        out = attend(one.problem, leaves[0], leaves[1], leaves[2])
        return torch.autograd.grad(out, leaves, one.dout)

    calls = [partial(step, one, one.leaves) for one in given]
    share = partial(_share, given[0], calls[0])
    return Contender(name, calls, share, peer=word != "warploom")


def _share(one: Step, call: Callable[[], Sequence[torch.Tensor]]) -> float:
    return error_share(one, call())


def _ours(problem: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return warploom.attention(q, k, v, causal=problem.causal)


def _cudnn(problem: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # The operators: to choose a backend by its context would be charged to the peer.
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: torch.Tensor = operator(q, k, v, None, True, 0.0, problem.causal)[0]
    return out


def _flash2(problem: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = operator(q, k, v, 0.0, problem.causal)[0]
    return out


def _flash4(problem: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash4(problem, Operands(q, k, v, q, {}))


class _Flash3(torch.autograd.Function):
    """The two operators of FlashAttention-3 as its users put them together."""

    @staticmethod
    def attend(
        problem: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
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


_ATTEND: dict[str, Attend] = {
    "warploom": _ours,
    "cudnn": _cudnn,
    "fa2": _flash2,
    "fa3": _Flash3.attend,
    "fa4": _flash4,
}

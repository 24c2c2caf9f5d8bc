"""Triton's peers, as torch's compiler writes and tunes them: a product, and flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import attention_peers
from benchmarks.peers import Kind, Operands
from benchmarks.protocol import Contender
from warploom.runtime.measure import Call, error_share

# Triton's templates alone, every one of them timed, as they are launched without CUDA graphs.
OPTIONS: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",
    "triton.cudagraphs": False,
}


def gemm_peer(kind: Kind, sets: Sequence[Operands]) -> Contender:
    """A product in Triton, tuned by torch's compiler."""
    compiled: list[Callable[..., torch.Tensor]] = []

    def call(one: Operands) -> torch.Tensor:
        if kind.a != "bf16":
            raise RuntimeError(f"triton: not for {kind.a} here")
        if not compiled:
            _require_triton()
            torch._dynamo.reset()  # or it gives up after a few shapes
            compiled.append(torch.compile(torch.mm, options=OPTIONS, dynamic=False))
        return _failing_softly(compiled[0], one.a, one.b)

    calls: list[Call] = [partial(call, one) for one in sets]
    return Contender("triton", calls, lambda: error_share(call(sets[0]), sets[0].a, sets[0].b))


def attention_peer(
    problem: attention_peers.Problem, sets: Sequence[attention_peers.Operands]
) -> Contender:
    """torch's flex_attention, compiled to Triton."""
    compiled: list[Callable[..., torch.Tensor]] = []

    def call(one: attention_peers.Operands) -> torch.Tensor:
        if problem.window is not None or problem.lengths:
            raise RuntimeError("triton: one causal mask and one length here")
        if not compiled:
            _require_triton()
            torch._dynamo.reset()
            compiled.append(_flex(problem, one.q.device))
        return _failing_softly(compiled[0], one.q, one.k, one.v)

    def share() -> float:
        return attention_peers.error_share(problem, sets[0], call(sets[0]))

    return Contender("Triton", [partial(call, one) for one in sets], share)


def _flex(problem: attention_peers.Problem, device: torch.device) -> Callable[..., torch.Tensor]:
    from torch.nn.attention import flex_attention as flex

    mask = None
    if problem.causal:

        def visible(
            _batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
        ) -> torch.Tensor:
            return column <= row

        mask = flex.create_block_mask(
            visible, None, None, problem.seq, problem.seq, device=str(device)
        )
    whole: Any = torch.compile(flex.flex_attention, dynamic=False)
    grouped = problem.heads != problem.kv_heads
    return partial(whole, block_mask=mask, enable_gqa=grouped)


def _require_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError("triton is not installed") from error


def _failing_softly(
    function: Callable[..., torch.Tensor], *arguments: torch.Tensor
) -> torch.Tensor:
    """Call what was compiled; its compiler's errors become what an absent peer raises."""
    try:
        return function(*arguments)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        raise RuntimeError(f"triton: {type(error).__name__}: {error}") from error

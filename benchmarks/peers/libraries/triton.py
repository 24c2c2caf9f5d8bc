"""What torch's compiler writes in Triton, tunes and calls: a GEMM, and flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.peers._attention import Operands
from benchmarks.peers._attention_baseline import Attend, AttentionBaseline, Forward
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._options_given import Given, Tensors
from benchmarks.peers._products import require_bf16
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.reference import error_share
from warploom.runtime.families.gemm.samples import Operands as GemmOperands
from warploom.runtime.measure import Call

ResultT = TypeVar("ResultT")

# Triton's templates alone, every one of them timed, as they are launched without CUDA graphs.
_TUNED: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",
    "triton.cudagraphs": False,
}


def compiled(
    make: Callable[[], Callable[..., ResultT]], *, tuned: bool = False
) -> Callable[..., ResultT]:
    """What `make` returns, compiled at its first call; whatever fails is a RuntimeError."""
    found: list[Callable[..., ResultT]] = []

    def call(*arguments: Any, **keywords: Any) -> ResultT:
        if not found:
            try:
                import triton  # noqa: F401
            except ImportError as error:
                raise RuntimeError("triton is not installed") from error
            torch._dynamo.reset()  # or it gives up after a few shapes
            options = _TUNED if tuned else None
            found.append(torch.compile(make(), options=options, dynamic=False))
        try:
            return found[0](*arguments, **keywords)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            raise RuntimeError(f"triton: {type(error).__name__}: {error}") from error

    return call


def gemm(operation: GemmOperation, given: Sequence[GemmOperands]) -> Contender:
    """A product in Triton, tuned by torch's compiler."""
    product = compiled(lambda: torch.mm, tuned=True)

    def call(one: GemmOperands) -> torch.Tensor:
        require_bf16("triton", operation)
        return product(one.a, one.b)

    calls: list[Call] = [partial(call, one) for one in given]
    first = given[0]
    return Contender("triton", calls, lambda: error_share(call(first), first.a, first.b), peer=True)


def _flex() -> Forward:
    """torch's flex_attention, compiled to Triton."""
    from torch.nn.attention import flex_attention as flex

    attend = compiled(lambda: flex.flex_attention)
    masks: list[Any] = []

    def visible(
        _batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return column <= row

    def call(problem: Attention, one: Operands) -> torch.Tensor:
        if problem.window is not None or problem.lengths:
            raise RuntimeError("triton: one causal mask and one length here")
        if not masks:
            seq, device = problem.seq, str(one.q.device)
            mask = partial(flex.create_block_mask, visible, None, None, seq, seq, device)
            masks.append(mask() if problem.causal else None)
        grouped = problem.heads != problem.kv_heads
        return attend(one.q, one.k, one.v, block_mask=masks[0], enable_gqa=grouped)

    return call


def _flex_with_option() -> Attend:
    """torch's flex_attention, compiled to Triton, with what an option does to scores."""
    call = compiled(_flexible)

    def attend(one: Given, tensors: Tensors) -> torch.Tensor:
        read = {**one.shared.read, **tensors}
        shared = one.problem.attention.heads != one.problem.attention.kv_heads
        return call(
            *(tensors["q"], tensors["k"], tensors["v"], one.shared.blocks),
            *(read.get("bias"), read.get("alibi_slopes"), read.get("sinks"), shared),
        )

    return attend


def _flexible() -> Callable[..., torch.Tensor]:
    """What is compiled."""
    from torch.nn.attention import flex_attention as flex

    flexible: Any = flex.flex_attention

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        blocks: object,  # torch's BlockMask
        bias: torch.Tensor | None,
        slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        shared: bool,
    ) -> torch.Tensor:
        def changed(
            score: torch.Tensor,
            _batch: torch.Tensor,
            head: torch.Tensor,
            row: torch.Tensor,
            column: torch.Tensor,
        ) -> torch.Tensor:
            if bias is not None:
                return score + bias[0, head, row, column]
            if slopes is not None:
                return score - slopes[head] * (row - column).abs()
            return score

        changes = changed if bias is not None or slopes is not None else None
        told = {"score_mod": changes, "block_mask": blocks, "enable_gqa": shared}
        if sinks is None:
            found: torch.Tensor = flexible(q, k, v, **told)
            return found
        out, more = flexible(q, k, v, **told, return_aux=flex.AuxRequest(lse=True))
        kept = torch.sigmoid(more.lse - sinks[None, :, None])  # of a row, what its sink leaves
        scaled: torch.Tensor = (out * kept[..., None]).to(out.dtype)
        return scaled

    return attend


FLEX = AttentionBaseline("Triton", forward=_flex, option=_flex_with_option)

"""FlashAttention-3 and 4, where they are installed.

FlashAttention-3 is `flash_attn_interface`, or the library of the operator `flash_attn_3::fwd` that
FLASH_ATTN_3 names in the environment (FLASH_ATTN_3_CUDART: the CUDA runtime that it was linked
with), FlashAttention-4 is `flash_attn.cute`. All compute softmax(q k^T dim ** -0.5) v in the type
of q.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers._attention import Operands
from benchmarks.peers._attention_baseline import AttentionBaseline, differentiated
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._decode_problem import Call
from benchmarks.peers._decode_problem import Given as Decoding
from benchmarks.peers._gradients import Backward, Step
from benchmarks.peers._options_given import Given, Tensors
from benchmarks.peers.libraries.vllm_flash_attention import flash3_two_dims


@cache
def flash3_operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both passes of FlashAttention-3, its library loaded; RuntimeError where there is none."""
    if library := os.environ.get("FLASH_ATTN_3"):
        if runtime := os.environ.get("FLASH_ATTN_3_CUDART"):
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    else:
        try:
            import_module("flash_attn_interface")  # registers the operator
        except ImportError as error:
            raise RuntimeError("flash_attn_interface is not installed") from error
    return torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd


# ---- FlashAttention-3 ----------------------------------------------------------------------------


def flash3_keywords(problem: Attention, one: Operands) -> dict[str, Any]:
    """What both passes of FlashAttention-3 are given beside tensors."""
    keywords: dict[str, Any] = {"softmax_scale": problem.dim**-0.5, **one.lengths}
    if problem.band is None:
        return {**keywords, "is_causal": problem.causal}
    left, right = problem.band
    return {**keywords, "window_size_left": left, "window_size_right": right}


def flash3(problem: Attention, one: Operands) -> torch.Tensor:
    """FlashAttention-3 takes [batch, seq, heads, dim], or packed [total, heads, dim].

    With v of another dimension it is that of vLLM, which is built for it.
    """
    if problem.dim_v:
        return flash3_two_dims(problem, one)
    forward, _ = flash3_operators()
    found: torch.Tensor = forward(*one.turned, **flash3_keywords(problem, one))[0]
    return found if problem.lengths else found.transpose(1, 2)


def _flash3_backward(one: Step, deterministic: bool) -> Backward:
    forward, backward = flash3_operators()
    keywords, given = flash3_keywords(one.problem, one.given), one.given.turned
    out, lse = forward(*given, **keywords)[:2]
    packed = one.problem.lengths
    dout = one.dout if packed else one.dout.transpose(1, 2)

    def call() -> Sequence[torch.Tensor]:
        found = backward(dout, *given, out, lse, deterministic=deterministic, **keywords)[:3]
        return [t if packed else t.transpose(1, 2) for t in found]

    return call


class _Flash3(torch.autograd.Function):
    """The two operators of FlashAttention-3 as its users put them together."""

    @staticmethod
    def attend(problem: Attention, one: Operands) -> torch.Tensor:
        """Attention on [batch, heads, seq, dim]."""
        given = (tensor.transpose(1, 2) for tensor in (one.q, one.k, one.v))
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


def flash3_decode(given: Decoding, page: int) -> Call:
    """FlashAttention-3; what it plans from lengths is planned before, as its users do."""
    forward, _ = flash3_operators()
    problem, causal = given.problem, given.problem.rows > 1
    sizes = problem.batch, problem.rows, problem.keys, problem.heads, problem.kv_heads
    planned = torch.ops.flash_attn_3.get_scheduler_metadata(
        *(*sizes, problem.dim, problem.dim, given.q.dtype, given.lengths),
        page_size=page or None,
        is_causal=causal,
        num_splits=0,
    )
    caches, more = given.caches(page), {"page_table": given.table(page)} if page else {}

    def call(index: int) -> torch.Tensor:
        found: torch.Tensor = forward(
            *(given.q, *caches[index]),
            seqused_k=given.lengths,
            softmax_scale=problem.dim**-0.5,
            is_causal=causal,
            scheduler_metadata=planned,
            num_splits=0,
            **more,
        )[0]
        return found

    return call


# ---- FlashAttention-4 ----------------------------------------------------------------------------


def flash4(problem: Attention, one: Operands, **keywords: Any) -> torch.Tensor:
    """The attention of FlashAttention-4, which autograd can differentiate."""
    cute: Any = import_module("flash_attn.cute")
    keywords["causal"] = problem.causal and problem.window is None
    keywords["window_size"] = problem.band or (None, None)
    function = cute.flash_attn_func
    if problem.lengths:
        function = cute.flash_attn_varlen_func
        keywords |= {name: one.lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    found = function(*one.turned, **keywords)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out if problem.lengths else out.transpose(1, 2)


def _flash4_backward(one: Step, deterministic: bool) -> Backward:
    options: dict[str, Any] = {"deterministic": True} if deterministic else {}
    return differentiated(one, deterministic, partial(flash4, **options))


def _flash4_with_sinks(one: Given, tensors: Tensors) -> torch.Tensor:
    """FlashAttention-4, whose sinks are learnt."""
    q, k, v, sinks = (tensors[name] for name in ("q", "k", "v", "sinks"))
    given = Operands(q, k, v, one.one.out, {})
    return flash4(one.problem.attention, given, learnable_sink=sinks)


FLASH3 = AttentionBaseline(
    "FlashAttention-3",
    forward=lambda: flash3,
    backward=_flash3_backward,
    trained=_Flash3.attend,
)
FLASH4 = AttentionBaseline(
    "FlashAttention-4",
    forward=lambda: flash4,
    backward=_flash4_backward,
    trained=flash4,
    option=lambda: _flash4_with_sinks,
)

"""Libraries of attention: torch's backends, and FlashAttention-3 and 4 where they are installed.

FlashAttention-3 is `flash_attn_interface`, or the library of the operator `flash_attn_3::fwd` that
FLASH_ATTN_3 names in the environment (FLASH_ATTN_3_CUDART: the CUDA runtime that it was linked
with), FlashAttention-4 is `flash_attn.cute`. All compute softmax(q k^T dim ** -0.5) v in the type
of q. What is missing or refuses raises RuntimeError or ValueError.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers._attention import Operands
from benchmarks.peers._attention_problem import Attention

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def refusing(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, whose ways to refuse are RuntimeErrors with its name."""

    @wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **keywords)
        except (ImportError, TypeError, AssertionError, NotImplementedError) as error:
            raise RuntimeError(f"{name}: {error}") from error

    return call


def cudnn(problem: Attention, one: Operands) -> torch.Tensor:
    """cuDNN as torch has it; its packed gradients read past what torch 2.11 allocates for them."""
    if problem.window is not None:
        raise ValueError("torch has no windows of cuDNN's")
    if problem.causal and not problem.square:
        raise ValueError("torch's causal mask of cuDNN begins at the top left")
    if not problem.lengths:
        return _sdpa(SDPBackend.CUDNN_ATTENTION, problem, one)
    if one.q.requires_grad:
        raise ValueError("torch has no gradients of cuDNN's packed sequences")
    found: torch.Tensor = torch.ops.aten._cudnn_attention_forward(
        *(one.q, one.k, one.v, None, *one.lengths.values()),
        *(False, 0.0, problem.causal, False),
        scale=problem.dim**-0.5,
    )[0]
    return found


def flash2(problem: Attention, one: Operands) -> torch.Tensor:
    """FlashAttention-2 as torch has it; windows and sequences that differ take its operator."""
    if problem.window is None and not problem.lengths and (problem.square or not problem.causal):
        return _sdpa(SDPBackend.FLASH_ATTENTION, problem, one)
    left, right = problem.band or (None, None)
    lengths = one.lengths.values() or (None, None, problem.seq, problem.columns)
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *(*turned(one), *lengths, 0.0, problem.causal and problem.window is None, False),
        scale=problem.dim**-0.5,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return found if problem.lengths else found.transpose(1, 2)


def _sdpa(backend: SDPBackend, problem: Attention, one: Operands) -> torch.Tensor:
    with sdpa_kernel([backend]):
        return torch.nn.functional.scaled_dot_product_attention(
            *(one.q, one.k, one.v),
            is_causal=problem.causal,
            enable_gqa=problem.heads != problem.kv_heads,
        )


def flash3_keywords(problem: Attention, one: Operands) -> dict[str, Any]:
    """What both passes of FlashAttention-3 are given beside tensors."""
    keywords: dict[str, Any] = {"softmax_scale": problem.dim**-0.5, **one.lengths}
    if problem.band is None:
        return {**keywords, "is_causal": problem.causal}
    left, right = problem.band
    return {**keywords, "window_size_left": left, "window_size_right": right}


def flash3(problem: Attention, one: Operands) -> torch.Tensor:
    """FlashAttention-3 takes [batch, seq, heads, dim], or packed [total, heads, dim]."""
    forward, _ = flash3_operators()
    found: torch.Tensor = forward(*turned(one), **flash3_keywords(problem, one))[0]
    return found if problem.lengths else found.transpose(1, 2)


def flash4(problem: Attention, one: Operands, **keywords: Any) -> torch.Tensor:
    """The attention of FlashAttention-4, which autograd can differentiate."""
    cute: Any = import_module("flash_attn.cute")
    keywords["causal"] = problem.causal and problem.window is None
    keywords["window_size"] = problem.band or (None, None)
    function = cute.flash_attn_func
    if problem.lengths:
        function = cute.flash_attn_varlen_func
        keywords |= {name: one.lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    found = function(*turned(one), **keywords)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out if problem.lengths else out.transpose(1, 2)


def turned(one: Operands) -> list[torch.Tensor]:
    """q, k and v as FlashAttention takes them: [batch, seq, heads, dim], packed as they are."""
    return [t if one.lengths else t.transpose(1, 2) for t in (one.q, one.k, one.v)]


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

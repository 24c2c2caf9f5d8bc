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

from benchmarks.peers._attention import Attention, Operands

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


def sdpa(backend: SDPBackend, problem: Attention, one: Operands) -> torch.Tensor:
    """torch's attention on one of its backends."""
    if problem.window is not None or problem.lengths:
        raise ValueError("torch has it for one causal mask and one length only")
    with sdpa_kernel([backend]):
        return torch.nn.functional.scaled_dot_product_attention(
            *(one.q, one.k, one.v),
            is_causal=problem.causal,
            enable_gqa=problem.heads != problem.kv_heads,
        )


def flash3_keywords(problem: Attention, one: Operands) -> dict[str, Any]:
    """What both passes of FlashAttention-3 are given beside tensors."""
    keywords: dict[str, Any] = {"softmax_scale": problem.dim**-0.5, **one.lengths}
    if problem.window is None:
        return {**keywords, "is_causal": problem.causal}
    return {**keywords, "window_size_left": problem.window, "window_size_right": 0}


def flash3(problem: Attention, one: Operands) -> torch.Tensor:
    """FlashAttention-3 takes [batch, seq, heads, dim], or packed [total, heads, dim]."""
    forward, _ = flash3_operators()
    found: torch.Tensor = forward(*turned(one), **flash3_keywords(problem, one))[0]
    return found if problem.lengths else found.transpose(1, 2)


def flash4(problem: Attention, one: Operands, **keywords: Any) -> torch.Tensor:
    """The attention of FlashAttention-4, which autograd can differentiate."""
    cute: Any = import_module("flash_attn.cute")
    keywords["causal"] = problem.causal and problem.window is None
    keywords["window_size"] = (None, None) if problem.window is None else (problem.window, 0)
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

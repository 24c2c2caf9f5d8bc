"""Warm calls run no operator of torch that is written in Python: each takes 20 us of the host.

Their results are those of first calls, and lie alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import warploom
from warploom import flash_attn, nn
from warploom.runtime import plan as plans
from warploom.runtime.families.activation_backward.api import activation_backward

Call = Callable[[], object]
FOLDER = Path(torch.__file__).parent
SLOW = tuple(
    str(FOLDER / name)
    for name in ("_refs", "_prims", "_prims_common", "_decomp", "_meta_registrations.py")
)


def values(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_(grad)


def operands(*, grad: bool = False, rows: int = 5) -> tuple[torch.Tensor, ...]:
    made = values(2, 4, rows, 64), values(2, 2, 24, 64), values(2, 2, 24, 64)
    return tuple(one.requires_grad_(grad) for one in made)


def numbers(*given: int) -> torch.Tensor:
    return torch.tensor(given, dtype=torch.int32)


def backward(run: Callable[..., torch.Tensor], *read: torch.Tensor) -> Call:
    """Both passes."""

    def both() -> object:
        found = run(*read)
        return torch.autograd.grad(found, read, torch.ones_like(found))

    return both


def tensors(results: object) -> list[torch.Tensor]:
    """Those that a call returned."""
    found = results if isinstance(results, tuple | list) else [results]
    return [one for one in found if isinstance(one, torch.Tensor)]


def products() -> dict[str, Call]:
    a, b, bias = values(8, 64), values(64, 32), values(32)
    trained = values(8, 64, grad=True), values(64, 32, grad=True), values(32, grad=True)
    packed = warploom.quantize(values(32, 64), "int4", group=32)
    layers = [nn.Linear(64, 32, dtype=torch.bfloat16, activation=f) for f in (None, "gelu_tanh")]
    quantized = [nn.QuantizedLinear.from_packed(packed, one) for one in (None, bias)]
    dy, z, out = (values(8, 32) for _ in range(3))
    plan = warploom.plan(a, b, out=out)
    return {
        "gemm": lambda: warploom.gemm(a, b),
        "gemm, out": lambda: warploom.gemm(a, b, out=out),
        "gemm, epilogue": lambda: warploom.gemm(a, b, bias=bias, activation="gelu", residual=dy),
        "gemm, both passes": backward(
            lambda a, b, bias: warploom.gemm(a, b, bias=bias, activation="silu"), *trained
        ),
        "plan": lambda: plan(a, b, out),
        "mixed_gemm": lambda: warploom.mixed_gemm(a, packed),
        **{f"Linear {i}": lambda one=one: one(a) for i, one in enumerate(layers)},
        **{
            f"Linear {i}, both passes": backward(
                lambda x, *_, one=one: one(x), trained[0], *one.parameters()
            )
            for i, one in enumerate(layers)
        },
        **{f"QuantizedLinear {i}": lambda one=one: one(a) for i, one in enumerate(quantized)},
        "QuantizedLinear, both passes": backward(quantized[0], trained[0]),
        "activation_backward": lambda: activation_backward(dy, z, "silu", sums=True),
    }


def attentions() -> dict[str, Call]:
    q, k, v = operands()
    last, _, _ = operands(rows=1)
    trained = operands(grad=True)
    offsets, lengths = numbers(0, 5, 24), numbers(24, 7)
    rows = values(24, 4, 64), values(24, 2, 64), values(24, 2, 64)
    packed = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 19,
        "max_seqlen_k": 19,
    }
    bias, mask = values(2, 4, 5, 24), torch.rand(2, 1, 5, 24) > 0.3
    lse, turns = torch.randn(2, 4, 5), torch.randn(32, 32)
    new = values(2, 2, 1, 64), values(2, 2, 1, 64)
    flash = [one.transpose(1, 2).contiguous() for one in (q, k, v)]
    chosen, flat = torch.tensor([[1, 0], [2, -1]]), values(2, 64)
    places = warploom.route(chosen, 8)[2]
    transposed, out = [one.transpose(1, 2) for one in flash], torch.empty_like(last)
    return {
        "attention": lambda: warploom.attention(q, k, v, causal="bottom_right"),
        "attention, transposed": lambda: warploom.attention(*transposed),
        "attention, varlen": lambda: warploom.attention(*rows, causal=True, **packed),
        "attention, bias": lambda: warploom.attention(q, k, v, bias=bias),
        "attention, mask": lambda: warploom.attention(q, k, v, mask=mask),
        "attention, both passes": backward(warploom.attention, *trained),
        "attention, bias, both passes": backward(
            lambda *read: warploom.attention(*read, bias=bias), *trained
        ),
        "attention_decode": lambda: warploom.attention_decode(last, k, v, cache_seqlens=lengths),
        "attention_decode, out": lambda: warploom.attention_decode(
            last, k, v, cache_seqlens=lengths, out=out
        ),
        "attention_append": lambda: warploom.append_kv_cache(
            k, v, *new, lengths, q=last, cos=turns, sin=turns
        ),
        "attention_merge": lambda: warploom.merge_state(q, lse, q.clone(), lse.clone()),
        "attention_quantize": lambda: warploom.attention_quantize(q, k, v),
        "route": lambda: warploom.route(chosen, 8),
        "combine": lambda: warploom.combine(warploom.permute(flat, places), places),
        "cast": lambda: warploom.cast(lse, torch.float8_e4m3fn, block=(1, 128), transpose=True),
        "sdpa": lambda: warploom.sdpa(q, k, v, enable_gqa=True),
        "flash_attn_func": lambda: flash_attn.flash_attn_func(*flash, causal=True),
        "flash_attn_func, both passes": backward(
            flash_attn.flash_attn_func, *[one.clone().requires_grad_() for one in flash]
        ),
        "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(
            flash[0], flash[1], flash[2], cache_seqlens=lengths, causal=True
        ),
    }


CALLS = {**products(), **attentions()}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_runs_no_operator_in_python(name: str) -> None:
    """Results made like a tensor on `meta` took half of a warm attention's time on the host."""
    call, found = CALLS[name], set()

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SLOW):
            found.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    for _ in range(3):
        call()
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert sorted(found) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_has_the_results_of_a_first_one(name: str) -> None:
    """Shapes, strides and types of results are kept with a plan."""
    plans.forget()
    first, *others = [tensors(CALLS[name]()) for _ in range(3)]
    for found in others:
        for one, like in zip(found, first, strict=True):
            assert torch.equal(one, like)
            assert (one.dtype, one.stride()) == (like.dtype, like.stride())
            assert one.requires_grad == like.requires_grad

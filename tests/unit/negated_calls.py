"""Calls of every public function, with each of the tensors that a kernel reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

import warploom
from warploom.quantization import PackedWeight
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.gemm.layer import Layer
from warploom.runtime.families.mixed_gemm.layer import Call as MixedLayerCall
from warploom.runtime.families.mixed_gemm.layer import Layer as MixedLayer

BF16, FP32 = torch.bfloat16, torch.float32
M, N, K, HEADS, ROWS, DIM = 16, 32, 64, 2, 128, 64
PLACES = torch.tensor([[3, 1], [0, -1], [6, 7], [2, 4]], dtype=torch.int32)
FULL = torch.tensor([[3, 1], [0, 5], [6, 7], [2, 4]], dtype=torch.int32)  # of every row
Tensors = dict[str, torch.Tensor]


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Case:
    """A function of tensors, all of which a kernel reads or writes."""

    call: Callable[..., object]
    made: Callable[[], Tensors]  # on the CPU
    written: tuple[str, ...] = ()
    unnegatable: tuple[str, ...] = ()  # of types that torch cannot negate


def gemm_operands() -> Tensors:
    return {
        "a": random(M, K),
        "b": random(K, N),
        "bias": random(N),
        "residual": random(M, N),
        "scale_a": random(M, dtype=FP32),
        "scale_b": random(N, dtype=FP32),
        "scale_d": random(1, dtype=FP32),
        "amax": random(1, dtype=FP32),
        "out": random(M, N),
    }


def grouped_operands() -> Tensors:
    return {
        "a": random(M, K),
        "b": random(2, K, N),
        "offs": integers(5, M),
        "bias": random(2, N),
        "scale_a": random(M, dtype=FP32),
        "scale_b": random(2, N, dtype=FP32),
        "row_scale": random(M, dtype=FP32),
        "out": random(M, N),
    }


def attention_operands() -> Tensors:
    return {
        "q": random(1, HEADS, ROWS, DIM),
        "k": random(1, HEADS, ROWS, DIM),
        "v": random(1, HEADS, ROWS, DIM),
        "sinks": random(HEADS, dtype=FP32),
        "alibi_slopes": random(HEADS, dtype=FP32),
        "bias": random(1, HEADS, ROWS, ROWS),
        "mask": torch.ones(1, HEADS, ROWS, ROWS, dtype=torch.bool),
        "dropout_state": torch.tensor([3, 5]),
        "out": random(1, HEADS, ROWS, DIM),
    }


def decode_operands() -> Tensors:
    return {
        "q": random(2, HEADS, 1, DIM),
        "k": random(4, HEADS, 64, DIM).to(torch.int8),
        "v": random(4, HEADS, 64, DIM).to(torch.int8),
        "cache_seqlens": integers(3, 5),
        "cache_leftpad": integers(0, 1),
        "page_table": integers(0, 1, 2, 3).view(2, 2),
        "sinks": random(HEADS, dtype=FP32),
        "scale_k": random(HEADS, dtype=FP32),
        "scale_v": random(HEADS, dtype=FP32),
        "out": random(2, HEADS, 1, DIM),
    }


def append_operands() -> Tensors:
    return {
        "k_cache": random(4, HEADS, 16, DIM).to(torch.int8),
        "v_cache": random(4, HEADS, 16, DIM).to(torch.int8),
        "k": random(2, HEADS, 1, DIM),
        "v": random(2, HEADS, 1, DIM),
        "lengths": integers(3, 5),
        "page_table": integers(0, 1, 2, 3).view(2, 2),
        "q": random(2, HEADS, 1, DIM),
        "cos": random(64, 8, dtype=FP32),
        "sin": random(64, 8, dtype=FP32),
        "scale_k": random(4, HEADS, 16, dtype=FP32),
        "scale_v": random(4, HEADS, 16, dtype=FP32),
        "lengths_after": integers(0, 0),
        "out": random(2, HEADS, 1, DIM),
    }


def mixed_operands() -> Tensors:
    return {
        "a": random(M, K),
        "bias": random(N),
        "residual": random(M, N),
        "out": random(M, N),
    }


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A layer's own way, by what is kept of its calls."""
    given = (x, weight, bias, "relu", "save")
    found = LINEAR.again(*given)
    return LINEAR.call(*given) if found is None else found


def quantized_linear(x: torch.Tensor, bias: torch.Tensor) -> object:
    """The same of a quantized weight."""
    weight = quantized(x.device)
    call = MixedLayerCall(weight.metadata, None, biased=True)
    read = (x, *weight.tensors().values(), bias)
    found = QUANTIZED.again(call, read)
    return QUANTIZED.call(call, read) if found is None else found


def leaf(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return random(*shape).to(like.device).requires_grad_()


def of_dout(dout: torch.Tensor, dlse: torch.Tensor) -> object:
    """The gradients of an attention."""
    operands = [leaf(dout, 1, HEADS, ROWS, DIM) for _ in "qkv"]
    results = warploom.attention(*operands, return_lse=True)
    return torch.autograd.grad(results, operands, (dout, dlse))


def of_dd(dd: torch.Tensor) -> object:
    """The gradients of a gemm."""
    operands = leaf(dd, M, K), leaf(dd, K, N)
    return torch.autograd.grad(warploom.gemm(*operands), operands, dd)


def of_linear(dd: torch.Tensor) -> object:
    """The gradients of a layer, whose bias and activation have a pass of their own."""
    operands = leaf(dd, M, K), leaf(dd, N, K), leaf(dd, N)
    return torch.autograd.grad(linear(*operands), operands, dd)


@cache
def quantized(device: torch.device) -> PackedWeight:
    return warploom.quantize(random(N, K), "int4", group=64).to(device)


quantized(torch.device("cpu"))  # before a test pretends a GPU
LINEAR, QUANTIZED = Layer(), MixedLayer()
CASES = {
    "gemm": Case(warploom.gemm, gemm_operands, ("out", "amax")),
    "gemm alone": Case(warploom.gemm, lambda: {"a": random(M, K), "b": random(N, K).t()}),
    "grouped_gemm": Case(
        lambda a, b, **keywords: warploom.grouped_gemm(a, b, **keywords), grouped_operands, ("out",)
    ),
    "planned gemm": Case(
        lambda a, b, out: warploom.plan(a, b, out=out)(a, b, out),
        lambda: {"a": random(M, K), "b": random(K, N), "out": random(M, N)},
        ("out",),
    ),
    "linear": Case(linear, lambda: {"x": random(M, K), "weight": random(N, K), "bias": random(N)}),
    "mixed_gemm": Case(
        lambda a, **keywords: warploom.mixed_gemm(a, quantized(a.device), **keywords),
        mixed_operands,
        ("out",),
    ),
    "quantized linear": Case(quantized_linear, lambda: {"x": random(M, K), "bias": random(N)}),
    "attention": Case(
        lambda q, k, v: warploom.attention(q, k, v, causal=True),
        lambda: {name: random(1, HEADS, ROWS, DIM) for name in "qkv"},
    ),
    "attention with options": Case(
        lambda **given: warploom.attention(**given, dropout_p=0.5),
        attention_operands,
        ("out",),
        ("mask",),
    ),
    "varlen attention": Case(
        lambda **given: warploom.attention(**given, max_seqlen_q=9, max_seqlen_k=9),
        lambda: {
            **{name: random(13, HEADS, DIM) for name in "qkv"},
            "cu_seqlens_q": integers(0, 4, 13),
            "cu_seqlens_k": integers(0, 5, 13),
        },
    ),
    "attention_decode": Case(warploom.attention_decode, decode_operands, ("out",)),
    "attention_append": Case(
        warploom.append_kv_cache,
        append_operands,
        ("k_cache", "v_cache", "scale_k", "scale_v", "lengths_after", "out"),
    ),
    "attention_merge": Case(
        warploom.merge_state,
        lambda: {
            **{name: random(4, DIM) for name in ("out_a", "out_b", "out")},
            **{name: random(4, dtype=FP32) for name in ("lse_a", "lse_b", "lse")},
        },
        ("out", "lse"),
    ),
    "attention_quantize": Case(
        warploom.attention_quantize,
        lambda: {name: random(1, HEADS, ROWS, DIM) for name in "qkv"},
    ),
    "activation_backward": Case(
        lambda **given: activation_backward(**given, activation="silu", sums=True),
        lambda: {name: random(M, N) for name in ("dy", "z", "out")},
        ("out",),
    ),
    "cast": Case(
        lambda **given: warploom.cast(**given, dtype=torch.int8),
        lambda: {"x": random(M, N), "scale": random(1, dtype=FP32), "amax": random(1, dtype=FP32)},
        ("amax",),
    ),
    "route": Case(
        lambda ids: warploom.route(ids, 4, first_expert=-4),
        lambda: {"ids": integers(*range(8)).reshape(4, 2)},
    ),
    "combine": Case(
        lambda **given: warploom.combine(**given, inverse=PLACES.to(given["rows"].device)),
        lambda: {"rows": random(8, DIM), "weights": random(4, 2, dtype=FP32)},
    ),
    "permute": Case(
        lambda **given: warploom.permute(**given, inverse=FULL.to(given["hidden"].device)),
        lambda: {"hidden": random(4, DIM)},
    ),
    "gradients of attention": Case(
        of_dout,
        lambda: {"dout": random(1, HEADS, ROWS, DIM), "dlse": random(1, HEADS, ROWS, dtype=FP32)},
    ),
    "gradients of gemm": Case(of_dd, lambda: {"dd": random(M, N)}),
    "gradients of linear": Case(of_linear, lambda: {"dd": random(M, N)}),
}
PAIRS = [(case, name) for case, one in CASES.items() for name in one.made()]
READ = [(case, name) for case, name in PAIRS if name not in CASES[case].written]
READ = [(case, name) for case, name in READ if name not in CASES[case].unnegatable]
WRITTEN = [(case, name) for case, name in PAIRS if name in CASES[case].written]

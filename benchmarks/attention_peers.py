"""The operands of an attention cell, and the calls on them: Warploom's and those of its peers.

Peers are cuDNN and FlashAttention-2, as torch's scaled_dot_product_attention calls them, and
FlashAttention-3 and 4 where their packages are installed: `flash_attn_interface`, or the library
of the operator `flash_attn_3::fwd` that FLASH_ATTN_3 names in the environment (FLASH_ATTN_3_CUDART:
the CUDA runtime that it was linked with), and `flash_attn.cute`. All compute
softmax(q k^T dim ** -0.5) v in the type of q.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import warploom
from benchmarks.protocol import Contender, Floor
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Call as Arguments
from warploom.runtime.families._attention.problem import extents
from warploom.runtime.families.attention_forward import reference
from warploom.runtime.measure import Call

FLOPS_PER_SECOND = 800e12  # what a power-limited H200 sustains in 16-bit products
_CHECKED_ROWS = 256  # of a sequence, at its end, held against float64


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention: [batch, heads, seq, dim] or, with `lengths`, packed sequences of them."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    causal: bool = False
    window: int | None = None  # columns to the left of the diagonal, which is always causal
    lengths: tuple[int, ...] = ()

    @property
    def keywords(self) -> dict[str, Any]:
        """What `warploom.attention` is given beside tensors."""
        window = {} if self.window is None else {"window": (self.window, 0)}
        return {"causal": self.causal, **window}

    @property
    def flops(self) -> int:
        """The work that the mask leaves: 4 dim for each score.

        A causal square counts half the scores of a full one, as it does everywhere; a window
        counts its own, exactly.
        """
        if self.window is not None:
            whole, ramp = self.seq, min(self.window + 1, self.seq)
            scores = ramp * (ramp + 1) // 2 + (whole - ramp) * ramp
            return 4 * self.batch * self.heads * self.dim * scores
        squares = sum(n * n for n in self.lengths) or self.batch * self.seq**2
        return 4 * self.heads * self.dim * squares // (2 if self.causal else 1)

    @property
    def floor(self) -> Floor:
        """The time that the products take at what a power-limited H200 sustains."""
        return Floor(self.flops / FLOPS_PER_SECOND, "flops")


@dataclass(frozen=True, slots=True)
class Operands:
    """Random q, k, v, and an output full of NaN; packed: offsets of the sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lengths: dict[str, Any]


def operands(problem: Problem, device: str, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """Make operands as a model has them: [batch, seq, heads, dim] in memory, seen transposed."""

    def tensor(heads: int) -> torch.Tensor:
        if problem.lengths:
            shape = (sum(problem.lengths), heads, problem.dim)
            return torch.randn(shape, device=device).to(dtype)
        shape4 = (problem.batch, problem.seq, heads, problem.dim)
        return torch.randn(shape4, device=device).to(dtype).transpose(1, 2)

    q, k, v = tensor(problem.heads), tensor(problem.kv_heads), tensor(problem.kv_heads)
    given: dict[str, Any] = {}
    if problem.lengths:
        offsets = torch.tensor([0, *problem.lengths], device=device).cumsum(0).int()
        longest = max(problem.lengths)
        given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return Operands(q, k, v, torch.full_like(q, torch.nan), given)


def ours(
    problem: Problem,
    sets: Sequence[Operands],
    spec: KernelSpec | None = None,
    name: str = "warploom",
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel."""
    given = [{**problem.keywords, **one.lengths, "out": one.out, "spec": spec} for one in sets]
    calls = [
        partial(warploom.attention, one.q, one.k, one.v, **keywords)
        for one, keywords in zip(sets, given, strict=True)
    ]

    def kernel() -> str:
        one = sets[0]
        return warploom.explain(warploom.plan_attention(one.q, one.k, one.v, **given[0])).kernel

    return Contender(name, calls, lambda: error_share(problem, sets[0], sets[0].out), kernel)


def peers(problem: Problem, sets: Sequence[Operands]) -> list[Contender]:
    """Every peer on each set of operands; one that is missing says so when it is called."""
    return [
        _peer(name, function, problem, sets)
        for name, function in (
            ("cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
            ("FlashAttention-2", partial(sdpa, SDPBackend.FLASH_ATTENTION)),
            ("FlashAttention-3", _flash3),
            ("FlashAttention-4", flash4),
        )
    ]


Peer = Callable[[Problem, Operands], torch.Tensor]


def _peer(name: str, function: Peer, problem: Problem, sets: Sequence[Operands]) -> Contender:
    def call(one: Operands) -> torch.Tensor:
        try:
            return function(problem, one)
        except (ImportError, TypeError, AssertionError, NotImplementedError) as error:
            raise RuntimeError(f"{name}: {error}") from error

    def share() -> float:
        return error_share(problem, sets[0], call(sets[0]))  # what was timed is the graph's memory

    calls: list[Call] = [partial(call, one) for one in sets]
    return Contender(name, calls, share)


def sdpa(backend: SDPBackend, problem: Problem, one: Operands) -> torch.Tensor:
    """torch's attention on one of its backends."""
    if problem.window is not None or problem.lengths:
        raise ValueError("torch has it for one causal mask and one length only")
    with sdpa_kernel([backend]):
        return torch.nn.functional.scaled_dot_product_attention(
            one.q,
            one.k,
            one.v,
            is_causal=problem.causal,
            enable_gqa=problem.heads != problem.kv_heads,
        )


def _flash3(problem: Problem, one: Operands) -> torch.Tensor:
    """FlashAttention-3 takes [batch, seq, heads, dim], or packed [total, heads, dim]."""
    keywords: dict[str, Any] = {"softmax_scale": problem.dim**-0.5, **one.lengths}
    if problem.window is None:
        keywords["is_causal"] = problem.causal
    else:
        keywords |= {"window_size_left": problem.window, "window_size_right": 0}
    forward, _ = flash3_operators()
    found: torch.Tensor = forward(*turned(one), **keywords)[0]
    return found if problem.lengths else found.transpose(1, 2)


def flash4(problem: Problem, one: Operands, **keywords: Any) -> torch.Tensor:
    """The attention of FlashAttention-4, which autograd can differentiate."""
    cute: Any = import_module("flash_attn.cute")
    keywords["causal"] = problem.causal and problem.window is None
    keywords["window_size"] = (None, None) if problem.window is None else (problem.window, 0)
    q, k, v = turned(one)
    if problem.lengths:
        offsets = one.lengths["cu_seqlens_q"]
        found = cute.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **keywords
        )
    else:
        found = cute.flash_attn_func(q, k, v, **keywords)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out if problem.lengths else out.transpose(1, 2)


def turned(one: Operands) -> list[torch.Tensor]:
    """q, k and v as FlashAttention takes them: [batch, seq, heads, dim], packed as they are."""
    tensors = (one.q, one.k, one.v)
    return [t if one.lengths else t.transpose(1, 2) for t in tensors]


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


# ---- Checking ------------------------------------------------------------------------------------


def error_share(problem: Problem, one: Operands, out: torch.Tensor) -> float:
    """Return the largest error of the last rows as a share of what is allowed.

    Allowed is twice the largest error of the plain torch expression in the same type, plus one
    ulp. Checked are the last rows of one batch, or of the longest sequence, which attend to the
    most columns, and all of the output for NaN.
    """
    if not out.isfinite().all():
        return float("inf")
    q, k, v, found = _end(problem, one, out)
    call = Arguments(q, k, v, causal="bottom_right" if problem.causal else False)
    if problem.window is not None:
        call.window = (problem.window, 0)
    masked = band(call, extents(call))
    exact, _ = reference.of_call(call, masked, reference.exact)
    plain, _ = reference.of_call(call, masked, reference.plain)
    allowed = 2 * float((plain.double() - exact).abs().max())
    allowed += reference.ulp(out.dtype, float(exact.abs().max()))
    return float((found.double() - exact).abs().max()) / allowed


def _end(
    problem: Problem, one: Operands, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last rows of the last batch or the longest sequence, and all of its columns."""
    if problem.lengths:
        longest = max(problem.lengths)
        first = sum(problem.lengths[: problem.lengths.index(longest)])
        at = slice(first, first + longest)
        tensors = [t[at].transpose(0, 1)[None] for t in (one.q, one.k, one.v, out)]
    else:
        tensors = [t[-1:] for t in (one.q, one.k, one.v, out)]
    q, k, v, found = tensors
    rows = slice(max(0, q.shape[2] - _CHECKED_ROWS), q.shape[2])
    return q[:, :, rows], k, v, found[:, :, rows]

"""FlashAttention-3 as vLLM builds it: `_vllm_fa3_C.abi3.so` in a folder of sys.path.

The library of vLLM's wheel needs torch 2.11 and CUDA 13, and nothing of vLLM. It is built for
packed sequences alone: those of one length are given as such, with offsets.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from benchmarks.peers._attention import Operands
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._attention_quantized import SCALES, Bound, Quantized
from benchmarks.peers.libraries import shared_library
from warploom.runtime.measure import Call

NAME = "FlashAttention-3, e4m3"
_LIBRARY = "_vllm_fa3_C.abi3.so"
# What its operator is given beside tensors, and where nothing else is said: as vLLM calls it.
_OPTIONS: dict[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


@cache
def _operator() -> tuple[Any, tuple[str, ...]]:
    """The forward pass, and the names of its arguments."""
    try:
        torch.ops.load_library(shared_library(_LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise RuntimeError(f"{_LIBRARY}: {error}") from error
    operator = torch.ops._vllm_fa3_C.fwd.default
    return operator, tuple(one.name for one in operator._schema.arguments)


def flash3_8bit(one: Quantized) -> Bound:
    """Bind operands: a call writes the output in bf16, and rounds to nothing coarser."""
    scales = {name: getattr(one, name) for name in SCALES}
    call = _bound(one.q, one.k, one.v, one.out, causal=one.causal, **scales)
    return Bound(call, lambda: one.out)


def flash3_two_dims(problem: Attention, one: Operands) -> torch.Tensor:
    """Attention in 16 bits, of v of another dimension than q and k: 128 with 192."""
    batch, heads, rows, _ = one.q.shape
    out = one.q.new_empty((batch, rows, heads, one.v.shape[-1])).transpose(1, 2)
    _bound(one.q, one.k, one.v, out, causal=problem.causal)()
    return out


def _bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    causal: bool,
    **scales: torch.Tensor,
) -> Call:
    """A call on [batch, heads, seq, dim], whose memory is [batch, seq, heads, dim]."""
    operator, names = _operator()
    batch, rows, keys = q.shape[0], q.shape[2], k.shape[2]

    def offsets(seq: int) -> torch.Tensor:
        return torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=q.device)

    tensors = {"q": q, "k": k, "v": v, "out": out}
    told = {
        **_OPTIONS,
        **{name: tensor.transpose(1, 2).flatten(0, 1) for name, tensor in tensors.items()},
        "cu_seqlens_q": offsets(rows),
        "cu_seqlens_k": offsets(keys),
        "max_seqlen_q": rows,
        "max_seqlen_k": keys,
        "softmax_scale": q.shape[-1] ** -0.5,
        "is_causal": causal,
        **scales,
    }
    return partial(operator, **{name: told.get(name) for name in names})

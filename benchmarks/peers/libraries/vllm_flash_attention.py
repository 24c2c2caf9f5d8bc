"""FlashAttention-3 as vLLM builds it, on e4m3: `_vllm_fa3_C.abi3.so` in a folder of sys.path.

The library of vLLM's wheel needs torch 2.11 and CUDA 13, and nothing of vLLM. It is built for
packed sequences alone: those of one length are given as such, with offsets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from benchmarks.peers._attention_quantized import Bound, Quantized
from benchmarks.peers.libraries import shared_library

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
    operator, names = _operator()
    batch, _, seq, _ = one.q.shape
    offsets = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=one.q.device)
    q, k, v, out = (t.transpose(1, 2).flatten(0, 1) for t in (one.q, one.k, one.v, one.out))
    told = {
        **_OPTIONS,
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": seq,
        "max_seqlen_k": seq,
        "softmax_scale": one.scale,
        "is_causal": one.causal,
        "q_descale": one.q_descale,
        "k_descale": one.k_descale,
        "v_descale": one.v_descale,
    }
    keywords = {name: told.get(name) for name in names}

    def call() -> None:
        operator(**keywords)

    return Bound(call, lambda: one.out)

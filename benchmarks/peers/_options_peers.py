"""Libraries of attention with an option: torch's backends, its flex_attention, FlashAttention-4.

Each takes one set of operands, and q, k, v and what else has a gradient, and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers._attention import Operands
from benchmarks.peers._flash import flash4
from benchmarks.peers._options_given import Given, Tensors
from benchmarks.peers._triton import compiled

Attend = Callable[[Given, Tensors], torch.Tensor]
BESIDE = {  # by the list of a cell: those that have what it asks for, or might
    "dropout": ("cudnn", "fa2", "efficient"),
    "scores": ("cudnn", "efficient", "triton"),
    "alibi": ("cudnn", "fa2", "efficient", "triton"),
    "sinks": ("fa4", "triton"),
    "blocks": ("triton",),
}


def _sdpa(backend: SDPBackend) -> Attend:
    """A backend of torch. ALiBi is a bias that was made before, which has the causal mask too."""

    def attend(one: Given, tensors: Tensors) -> torch.Tensor:
        read, problem = {**one.shared.read, **tensors}, one.problem
        alibi = problem.kind == "alibi"
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(
                *(tensors["q"], tensors["k"], tensors["v"]),
                attn_mask=one.shared.biases if alibi else read.get("mask", read.get("bias")),
                dropout_p=problem.dropout_p,
                is_causal=problem.attention.causal and not alibi,
            )

    return attend


def _flash2(one: Given, tensors: Tensors) -> torch.Tensor:
    """FlashAttention-2 as torch has it; ALiBi takes its operator."""
    if one.problem.kind != "alibi":
        return _sdpa(SDPBackend.FLASH_ATTENTION)(one, tensors)
    q, k, v = (tensors[name] for name in "qkv")
    if q.requires_grad:
        raise ValueError("torch has no gradients of FlashAttention-2's ALiBi")
    seq, causal = one.problem.attention.seq, one.problem.attention.causal
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        *(None, None, seq, seq, 0.0, causal, False),
        alibi_slopes=one.shared.read["alibi_slopes"],
    )[0]
    return found.transpose(1, 2)


def _flash4(one: Given, tensors: Tensors) -> torch.Tensor:
    """FlashAttention-4, whose sinks are learnt."""
    q, k, v, sinks = (tensors[name] for name in ("q", "k", "v", "sinks"))
    given = Operands(q, k, v, one.one.out, {})
    return flash4(one.problem.attention, given, learnable_sink=sinks)


def _flex() -> Attend:
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


PEERS: dict[str, Callable[[], Attend]] = {
    "cudnn": lambda: _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: _flash2,
    "efficient": lambda: _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "fa4": lambda: _flash4,
    "triton": _flex,
}

"""torch.compile and torch.library see attention as an operator that behaves as torch expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom

Q = torch.randn(2, 6, 4, 16).bfloat16().transpose(1, 2)
K, V = torch.randn(2, 2, 9, 16).bfloat16(), torch.randn(2, 2, 9, 16).bfloat16()
OFFSETS_Q = torch.tensor([0, 2, 6], dtype=torch.int32)
OFFSETS_K = torch.tensor([0, 5, 9], dtype=torch.int32)
PACKED: dict[str, Any] = {
    "cu_seqlens_q": OFFSETS_Q,
    "cu_seqlens_k": OFFSETS_K,
    "max_seqlen_q": 4,
    "max_seqlen_k": 5,
}
FIXED = (Q, K, V)
ONE = (Q[0].transpose(0, 1), K[0].transpose(0, 1), V[0].transpose(0, 1))

CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (FIXED, {}),
    "causal": (FIXED, {"causal": "bottom_right"}),
    "causal True": ((Q, Q, Q), {"causal": True}),
    "all": (FIXED, {"causal": "top_left", "window": (3, None), "softcap": 2.0, "scale": 0.3}),
    "packed": (ONE, {"window": (2, 1), **PACKED}),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_takes_every_keyword_without_a_graph_break(name: str) -> None:
    given, keywords = CALLS[name]

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = warploom.attention(q, k, v, return_lse=True, **keywords)
        return out * 2, lse + 1

    expected = layer(*given)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(*given), expected, strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_torch_compile_writes_to_out() -> None:
    def into(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, K, V, out=out) + 1

    compiled = torch.compile(into, fullgraph=True, backend="aot_eager")
    out, expected = torch.zeros_like(Q), torch.zeros_like(Q)
    assert torch.equal(compiled(Q, out), into(Q, expected))
    assert torch.equal(out, expected)


def test_torch_compile_follows_lengths_that_vary() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, k, causal="bottom_right")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq_q, seq_k in ((5, 9), (7, 7), (11, 6)):
        q, k = torch.randn(2, 4, seq_q, 16).half(), torch.randn(2, 2, seq_k, 16).half()
        assert torch.equal(compiled(q, k), layer(q, k))


def test_a_kernel_can_be_named_inside_torch_compile() -> None:
    name = warploom.explain(warploom.plan_attention(*FIXED)).kernel
    compiled = torch.compile(
        lambda q: warploom.attention(q, K, V, spec=name), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(Q), warploom.attention(Q, K, V))


@pytest.mark.parametrize("packed", [False, True])
def test_torch_finds_no_fault_with_the_operators(packed: bool) -> None:
    given = ONE if packed else FIXED
    lengths = tuple(PACKED.values()) if packed else (None,) * 4
    arguments = (*given, "bottom_right", 3, None, 2.0, None, *lengths, None)
    torch.library.opcheck(torch.ops.warploom.attention.default, arguments)
    arguments = (*arguments, torch.empty_like(given[0]))
    torch.library.opcheck(torch.ops.warploom.attention_into.default, arguments)

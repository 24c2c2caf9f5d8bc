"""Attention of operands that are quantized in each call, asked for by name, on a GPU."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from tiny_models import VOCABULARY, model

import warploom
from warploom.integrations import transformers_attention

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SCORES = pytest.mark.parametrize("scores", ["int8", "e4m3"])
LAUNCHES = 3  # of the mean and largest magnitudes, of values, and of the attention


def operands(dim: int) -> tuple[torch.Tensor, ...]:
    """q of more heads than k and v, which have means."""
    torch.manual_seed(0)
    q = torch.randn(2, 8, 300, dim, device="cuda", dtype=BF16)
    k = torch.randn(2, 2, 421, dim, device="cuda") + torch.randn(dim, device="cuda")
    v = torch.randn(2, 2, 421, dim, device="cuda") + 1
    return q, k.to(BF16), v.to(BF16)


@SCORES
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_sdpa_quantizes_where_it_is_told(dim: int, scores: Literal["int8", "e4m3"]) -> None:
    q, k, v = operands(dim)
    keywords: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(one.double().cpu() for one in (q, k, v)), **keywords
    )
    warploom.sdpa(q, k, v, **keywords, scores=scores)  # compiles
    before = warploom.counters.launches
    found = warploom.sdpa(q, k, v, **keywords, scores=scores)
    assert warploom.counters.launches == before + LAUNCHES
    assert (found.cpu() - exact).norm() / exact.norm() < 0.025
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = warploom.sdpa(q, k, v, **keywords, scores=scores)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, found)


@SCORES
def test_sdpa_that_quantizes_has_gradients(scores: Literal["int8", "e4m3"]) -> None:
    leaves = [one.requires_grad_() for one in operands(128)]
    keywords: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    out = warploom.sdpa(*leaves, **keywords, scores=scores)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    wide = [one.detach().double().cpu().requires_grad_() for one in leaves]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, **keywords)
    for one, right in zip(
        found, torch.autograd.grad(exact, wide, dout.double().cpu()), strict=True
    ):
        assert (one.cpu() - right).norm() / right.norm() < 0.1


def test_a_patched_model_attends_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    inner = transformers_attention.attention_8bit

    def counted(*given: torch.Tensor, **keywords: Any) -> torch.Tensor:
        calls.append(given[0])
        found: torch.Tensor = inner(*given, **keywords)
        return found

    monkeypatch.setattr(transformers_attention, "attention_8bit", counted)
    ids = torch.randint(2, VOCABULARY, (2, 96), device="cuda")
    speaking = model("Llama", "eager", BF16, head_dim=64).cuda()
    exact = model("Llama", "eager", torch.float32, head_dim=64).cuda()(ids).logits
    plain = speaking(ids).logits
    with warploom.patch(speaking, linear=False, attention="8bit"):
        found = speaking(ids).logits
        found.float().sum().backward()
    assert len(calls) == 2 and all(one.is_cuda for one in calls)
    assert all(one.grad is not None for one in speaking.parameters())
    assert (found - exact).abs().max() < 4 * (plain - exact).abs().max() + 0.1

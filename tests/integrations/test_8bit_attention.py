"""Attention of operands that are quantized in each call, where it is asked for by name."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
import torch
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError
from warploom.integrations import transformers_attention

IDS = torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
WIDE = {"head_dim": 32}
POSITIONS = torch.tensor([[*range(14), *range(10)], [*range(6), *range(18)]])


@pytest.fixture
def quantized(paths: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many attentions were of 8 bits, too."""
    transformers_attention.register()
    inner = transformers_attention.attention_8bit

    def counted(*operands: torch.Tensor, **keywords: Any) -> torch.Tensor:
        paths["of 8 bits"] += 1
        found: torch.Tensor = inner(*operands, **keywords)
        return found

    monkeypatch.setattr(transformers_attention, "attention_8bit", counted)
    return paths


def test_a_patched_model_attends_in_8_bits_and_comes_back(quantized: Counter[str]) -> None:
    speaking = model("Llama", "eager", torch.float32, **WIDE).bfloat16()
    exact = model("Llama", "eager", torch.float32, **WIDE)(IDS).logits
    plain = speaking(IDS).logits
    with warploom.patch(speaking, linear=False, attention="8bit") as patch:
        assert "eager -> warploom_8bit" in repr(patch)
        found = speaking(IDS).logits
        assert quantized["of 8 bits"] == 2
        found.float().sum().backward()
        assert all(one.grad is not None for one in speaking.parameters())
    assert (found - exact).abs().max() < 4 * (plain - exact).abs().max() + 0.1
    assert not torch.equal(found, plain)
    assert speaking.config._attn_implementation == "eager"
    assert torch.equal(speaking(IDS).logits, plain)


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        (WIDE, {"position_ids": POSITIONS, "use_cache": False}),
        ({"head_dim": 16}, {}),
    ],
    ids=["packed", "dimension"],
)
def test_what_no_kernel_of_8_bits_computes_is_of_16(
    sizes: dict[str, Any], case: dict[str, Any], quantized: Counter[str]
) -> None:
    found = model("Llama", "warploom_8bit", **sizes)(IDS, **case).logits
    assert quantized["of 8 bits"] == 0 and quantized["by_kernels"] == 2
    assert torch.equal(found, model("Llama", "warploom", **sizes)(IDS, **case).logits)


def test_a_compiled_model_attends_in_8_bits(paths: Counter[str]) -> None:
    transformers_attention.register()
    speaking = model("Llama", "warploom_8bit", **WIDE)
    with torch.no_grad():
        plain = speaking(IDS).logits
        torch._dynamo.reset()
        compiled = torch.compile(speaking, backend="aot_eager")(IDS).logits
    assert (compiled - plain).abs().max() < 0.1
    assert paths["by_torch"] == 0


def test_a_model_that_is_not_told_attends_in_16_bits(quantized: Counter[str]) -> None:
    model("Llama", "warploom", **WIDE)(IDS)
    assert quantized["of 8 bits"] == 0 and quantized["by_kernels"] == 2


@pytest.mark.parametrize("attention", ["e4m3", "warploom", ""])
def test_another_word_for_the_attention_is_refused(attention: Literal["8bit"]) -> None:
    with pytest.raises(ProblemError, match='must be True, False or "8bit"'):
        warploom.patch(torch.nn.Sequential(torch.nn.Linear(8, 8)), attention=attention)


@pytest.mark.parametrize("scores", ["int8", "e4m3"])
@pytest.mark.parametrize("lead", [(2,), (), (2, 3)], ids=str)
def test_sdpa_quantizes_where_it_is_told(
    scores: Literal["int8", "e4m3"], lead: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    q = torch.randn(*lead, 4, 40, 64).bfloat16()
    k, v = (torch.randn(*lead, 2, 56, 64).bfloat16() for _ in range(2))
    keywords: dict[str, Any] = {"is_causal": True, "scale": 0.2, "enable_gqa": True}
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(one.double() for one in (q, k, v)), **keywords
    )
    found = warploom.sdpa(q, k, v, **keywords, scores=scores)
    assert found.shape == q.shape and found.dtype == q.dtype
    assert 0.005 < (found - exact).norm() / exact.norm() < 0.08
    plain = warploom.sdpa(q, k, v, **keywords)
    assert (plain - exact).norm() / exact.norm() < 0.005


def test_sdpa_of_8_bits_refuses_what_it_has_not() -> None:
    q = torch.randn(2, 4, 40, 64).bfloat16()
    mask = torch.ones(40, 40, dtype=torch.bool)
    with pytest.raises(ProblemError, match="attn_mask with scores: no kernel"):
        warploom.sdpa(q, q, q, mask, scores="int8")
    with pytest.raises(ProblemError, match=r"dropout_p 0.1 with scores: no kernel"):
        warploom.sdpa(q, q, q, dropout_p=0.1, scores="int8")
    with pytest.raises(ProblemError, match="4 heads of query by 2 of key: must be as many"):
        warploom.sdpa(q, q[:, :2], q[:, :2], scores="int8")
    with pytest.raises(ProblemError, match='must be "int8" or "e4m3"'):
        warploom.sdpa(q, q, q, scores="fp8")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="must be left out: operands are quantized first"):
        warploom.explain(warploom.sdpa, q, q, q, scores="int8")

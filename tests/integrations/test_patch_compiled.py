"""Patched models that are compiled, whole or layer by layer, and that generate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, model
from transformers import CompileConfig

import warploom
from warploom.integrations import transformers_attention

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def attentions(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The calls of Warploom's attention in a graph."""
    return [node for node in graph.graph.nodes if "warploom.attention" in str(node.target)]


def masked(node: torch.fx.Node) -> bool:
    """Whether such a call has a mask that is a tensor."""
    schema = torch.ops.warploom.attention.default._schema  # whose last argument it is
    return len(node.args) == len(schema.arguments)


@pytest.mark.parametrize("part", ["model", "layers"])
def test_patched_models_compile(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and layer by layer without a graph break; a layer takes a mask that is told by bounds.

    A whole model makes its mask where no value of a tensor may be looked at: there it is a tensor.
    """
    monkeypatch.setattr(transformers_attention, "elsewhere", lambda tensor: None)
    visible = torch.ones_like(IDS)
    visible[0, :4] = 0
    called: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:  # noqa: ANN401
        called.extend(attentions(graph))
        return graph

    fresh = partial(model, "Mistral", "eager", num_hidden_layers=1)  # all layers are alike
    speaking = fresh()
    with torch.no_grad():
        exact = fresh(torch.float32)(IDS, attention_mask=visible).logits
        rough = fresh()(IDS, attention_mask=visible).logits
        warploom.patch(speaking)
        compiled = speaking
        if part == "model":
            compiled = torch.compile(speaking, backend=backend, fullgraph=True)
        else:
            for layer in speaking.model.layers:
                layer.compile(backend=backend, fullgraph=True)
        found = compiled(IDS, attention_mask=visible, use_cache=False).logits
    assert {masked(node) for node in called} == {part == "model"}
    here = visible.bool()
    error = float((found.float() - exact)[here].abs().max())
    assert error < 2 * float((rough.float() - exact)[here].abs().max()) + 0.05


@pytest.mark.parametrize(
    ("name", "kind", "is_masked"),
    [
        ("Llama", torch.float32, []),  # torch computes it, in any model
        ("Llama", torch.bfloat16, [False]),
        ("Mistral", torch.bfloat16, [True]),
    ],
)
def test_a_whole_model_that_is_compiled_knows_that_nothing_is_packed(
    name: str, kind: torch.dtype, is_masked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without position ids of the caller's, sequences were looked for and masks were tensors.

    A window stays what it is, position ids that pack two sequences too, and undoing ends it.
    """
    monkeypatch.setattr(transformers_attention, "elsewhere", lambda tensor: None)
    called: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:  # noqa: ANN401
        called.extend(attentions(graph))
        return graph

    two = torch.arange(IDS.shape[1]) % (IDS.shape[1] // 2)
    plain, packed = {"use_cache": False}, {"use_cache": False, "position_ids": two[None]}
    speaking = model(name, "sdpa", torch.float32, num_hidden_layers=1)  # all layers are alike
    with torch.no_grad():
        wanted = [speaking(IDS, **keywords).logits for keywords in (plain, packed)]
        assert not torch.allclose(*wanted, atol=0.4, rtol=0.2)
        torch._dynamo.reset()
        speaking = model(name, "sdpa", kind, num_hidden_layers=1)
        done = warploom.patch(speaking)
        compiled = torch.compile(speaking, backend=backend, fullgraph=True)
        found = [compiled(IDS, **plain).logits]
        assert [masked(node) for node in called] == is_masked
        found.append(compiled(IDS, **packed).logits)
        for logits, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(logits.float(), right, atol=0.1, rtol=0.1)
        done.undo()
        assert not any(part._forward_pre_hooks for part in speaking.modules())


def test_generation_compiles() -> None:
    """Steps after the prompt are compiled for a cache of a fixed size: its mask is an input.

    Of Gemma2's layers one has a window, and the other, as all of Llama's, none.
    """
    visible = torch.ones_like(IDS)
    visible[0, :4] = 0
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # not only on GPUs
    torch._dynamo.reset()
    tokens = [
        model("Gemma2", attention, torch.float32).generate(
            IDS,
            attention_mask=visible,
            max_new_tokens=4,
            do_sample=False,
            cache_implementation="static",
            **how,
        )
        for attention, how in (
            ("eager", {"disable_compile": True}),
            ("warploom", {"compile_config": compiled}),
        )
    ]
    assert torch.equal(*tokens)


def test_generation_of_a_patched_model() -> None:
    """Token by token what the model says unpatched, where both are torch's arithmetic."""
    speaking = model("Llama", "sdpa", torch.float32)
    keywords = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": "static"}
    before = speaking.generate(IDS, disable_compile=True, **keywords)
    with warploom.patch(speaking):
        assert torch.equal(speaking.generate(IDS, disable_compile=True, **keywords), before)

"""`warploom.patch`: what it replaces, what it says of the rest, and that nothing of it remains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import warploom
from warploom.errors import ProblemError
from warploom.nn import Linear

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
LINEAR_OF_LLAMA = 2 * 7 + 1


def places(patched: torch.nn.Module) -> dict[str, int]:
    """Every module of a model, and every parameter, by name and identity."""
    modules = {name: id(value) for name, value in patched.named_modules(remove_duplicate=False)}
    return modules | {name: id(value) for name, value in patched.named_parameters()}


def implementations(patched: Any) -> list[str]:  # noqa: ANN401
    """What attention the configurations of a model ask for."""
    config = patched.config
    inner = [getattr(config, name)._attn_implementation for name in config.sub_configs]
    return [config._attn_implementation, *inner]


def test_linear_layers_and_attention_are_replaced_and_come_back() -> None:
    """Undone, a model has the module objects, parameters and attention that it had."""
    speaking = model("Llama", "eager", torch.float32)
    before, said = places(speaking), speaking(IDS).logits
    with warploom.patch(speaking) as patch:
        swapped = [module for module in speaking.modules() if isinstance(module, torch.nn.Linear)]
        assert len(swapped) == LINEAR_OF_LLAMA
        assert all(type(module) is Linear for module in swapped)
        assert implementations(speaking) == ["warploom"]
        shared = {id(parameter) for parameter in speaking.parameters()}
        assert shared <= set(before.values()), "a parameter was copied"
        assert (speaking(IDS).logits - said).abs().max() < 1e-5
    assert places(speaking) == before
    assert implementations(speaking) == ["eager"]
    assert torch.equal(speaking(IDS).logits, said)
    patch.undo()  # does nothing
    warploom.patch(speaking).undo()
    assert places(speaking) == before


def test_the_report_says_what_and_why() -> None:
    """What is not on Warploom has its line, with the reason, where somebody looks for it."""
    patch = warploom.patch(model("Llama", "sdpa"))
    table = repr(patch)
    assert table.startswith("warploom.patch(LlamaForCausalLM)\n")
    assert any(row.what == "torch.nn.Linear" and row.count == LINEAR_OF_LLAMA for row in patch.rows)
    assert "sdpa -> warploom" in table
    assert "float32" not in table
    assert "float32" in repr(warploom.patch(model("Llama", "sdpa", torch.float32)))
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=32)
    rows = {row.what: row for row in warploom.patch(GPT2LMHeadModel(config)).rows}
    assert rows["Conv1D"].count == 4
    assert rows["Conv1D"].because == "no torch.nn.Linear"
    assert rows["torch.nn.Linear"].count == 1


def test_tied_weights_stay_tied() -> None:
    """A head that shares the embedding's weight learns with it, patched, saved and undone."""
    speaking = model("Gemma2", "eager")
    assert speaking.lm_head.weight is speaking.model.embed_tokens.weight
    with warploom.patch(speaking):
        assert type(speaking.lm_head) is Linear
        assert speaking.lm_head.weight is speaking.model.embed_tokens.weight
        speaking.tie_weights()
        assert speaking.lm_head.weight is speaking.get_input_embeddings().weight
    assert speaking.lm_head.weight is speaking.model.embed_tokens.weight


def test_a_module_in_two_places_stays_one() -> None:
    """A layer that is shared is one layer after the patch, and its parameters have one gradient."""
    shared = torch.nn.Linear(8, 8)
    chain = torch.nn.Sequential(shared, torch.nn.ReLU(), shared)
    with warploom.patch(chain) as patch:
        assert chain[0] is chain[2]
        assert type(chain[0]) is Linear
        assert patch.rows[0].count == 1
    assert chain[0] is shared
    assert chain[2] is shared


def test_plain_models_get_their_linear_layers() -> None:
    """A model of torch alone, without transformers' interface; subclasses are left and told."""
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.MultiheadAttention(8, 2))
    patch = warploom.patch(plain)
    assert type(plain[0]) is Linear
    assert type(plain[1].out_proj) is not Linear
    rows = {row.what: row for row in patch.rows}
    assert rows["NonDynamicallyQuantizableLinear"].because == "a subclass"
    assert rows["attention"].now == "as it was"


def test_parts_can_be_chosen() -> None:
    """Linear layers alone, or attention alone."""
    speaking = model("Llama", "eager")
    with warploom.patch(speaking, attention=False):
        assert implementations(speaking) == ["eager"]
        assert type(speaking.lm_head) is Linear
    with warploom.patch(speaking, linear=False):
        assert implementations(speaking) == ["warploom"]
        assert type(speaking.lm_head) is torch.nn.Linear


def test_models_of_several_configurations_get_their_own_back() -> None:
    """A vision tower that ran on another attention than the text does so again."""
    from transformers import AutoModelForImageTextToText

    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": VOCABULARY,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
        image_token_index=3,
    )
    speaking = AutoModelForImageTextToText.from_config(config)
    speaking.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    before = implementations(speaking)
    assert len(set(before)) == 2
    with warploom.patch(speaking):
        assert set(implementations(speaking)) == {"warploom"}
    assert implementations(speaking) == before


def test_parts_with_configurations_of_their_own_are_not_left_out() -> None:
    """T5's encoder and decoder have copies of its configuration, each with its attention."""
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCABULARY)
    speaking = T5ForConditionalGeneration(config)
    parts = [speaking, speaking.encoder, speaking.decoder]
    before = [part.config._attn_implementation for part in parts]
    with warploom.patch(speaking):
        assert [part.config._attn_implementation for part in parts] == ["warploom"] * 3
    assert [part.config._attn_implementation for part in parts] == before


def test_what_happens_to_a_patched_model_is_kept() -> None:
    """Undone after training: new parameter objects, the mode, and layers that were wrapped."""
    chain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    first, second = chain
    patch = warploom.patch(chain)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    chain[0].weight = weight
    chain.eval()
    chain[1] = torch.nn.Sequential(chain[1])  # as an adapter wraps a layer
    patch.undo()
    assert chain[0] is first
    assert first.weight is weight
    assert not first.training
    assert chain[1][0] is second


class Quantised(torch.nn.Sequential):
    """Says of itself what transformers says of quantised models."""

    is_quantized = True


def test_models_that_cannot_be_patched_are_left_alone() -> None:
    """All is checked before anything changes, and the error says which layer and what to do."""
    patched = model("Llama", "eager")
    patch = warploom.patch(patched)
    on_meta = model("Llama", "eager")
    on_meta.lm_head.to("meta")
    wrapped = model("Llama", "eager")
    wrapped.lm_head.forward = wrapped.lm_head.forward
    apart = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    apart[1].bias = torch.nn.Parameter(torch.empty(4, device="meta"))
    refused: list[tuple[torch.nn.Module, str]] = [
        (patched, "patched already"),
        (copy.copy(patched.model), "patched already"),
        (on_meta, "lm_head: weight on meta"),
        (wrapped, "lm_head: .* forward was replaced"),
        (apart, "1: weight on cpu, bias on meta"),
        (Quantised(torch.nn.Linear(4, 4)), "Quantised, which is quantized: .*linear=False"),
        (torch.nn.Linear(4, 4), "from_torch"),
    ]
    for refusing, words in refused:
        before = places(refusing)
        with pytest.raises(ProblemError, match=words):
            warploom.patch(refusing)
        assert places(refusing) == before
    assert implementations(on_meta) == ["eager"]
    patch.undo()
    warploom.patch(patched)


def test_an_attention_that_transformers_refuses_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where setting the attention fails half-way, neither it nor the layers remain."""
    speaking = model("Llama", "eager")
    before = places(speaking)

    def refusing(implementation: str) -> None:
        speaking.config._attn_implementation = implementation
        raise ValueError("no")

    monkeypatch.setattr(speaking, "set_attn_implementation", refusing)
    with pytest.raises(ValueError, match="no"):
        warploom.patch(speaking)
    assert places(speaking) == before
    assert implementations(speaking) == ["eager"]


def test_models_can_be_made_with_it() -> None:
    """`register_transformers` is enough for attn_implementation="warploom" in a config."""
    warploom.register_transformers()
    config = model("Llama", "eager").config
    made = type(model("Llama", "eager"))._from_config(config, attn_implementation="warploom")
    assert implementations(made) == ["warploom"]
    assert made(IDS).logits.isfinite().all()

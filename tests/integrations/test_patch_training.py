"""`warploom.patch(model, weights=...)` freezes nothing that trains: adapters, heads, layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, model
from transformers import GPT2Config, GPT2ForSequenceClassification

import warploom
from warploom.integrations.patch import Patch
from warploom.nn import QuantizedLinear

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
WEIGHTS: dict[str, Any] = {"format": "int8", "group": 32}


def trains(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


def quantized(module: torch.nn.Module) -> list[str]:
    return [name for name, one in module.named_modules() if isinstance(one, QuantizedLinear)]


def stays_trained(module: torch.nn.Module, **options: Any) -> Patch:
    """Patch a model, all of whose trained parameters stay, by name and object."""
    before = trains(module)
    patch = warploom.patch(module, weights={**WEIGHTS, **options})
    assert before
    after = trains(module)
    assert before.keys() == after.keys()
    assert all(after[name] is one for name, one in before.items())
    return patch


def frozen(*left: str) -> torch.nn.Module:
    """A Llama that is frozen but for parameters in whose names one of some parts is."""
    speaking: torch.nn.Module = model("Llama", "eager")
    for name, parameter in speaking.named_parameters():
        parameter.requires_grad_(any(part in name for part in left))
    return speaking


@pytest.mark.parametrize("skip", [None, []])
@pytest.mark.parametrize("left", [["lm_head"], ["layers.1."], ["down_proj", "norm"]])
def test_layers_that_train_where_others_are_frozen_are_left(
    left: list[str], skip: list[str] | None
) -> None:
    """Also where `skip` leaves nothing out; the report says why."""
    speaking = frozen(*left)
    patch = stays_trained(speaking, **({} if skip is None else {"skip": skip}))
    assert quantized(speaking)
    if left != ["lm_head"] or skip == []:
        assert any("it trains" in row.because for row in patch.rows)
    speaking(IDS).logits.sum().backward()
    assert all(one.grad is not None for one in trains(speaking).values())


def test_a_head_that_is_tied_to_an_embedding_that_trains_is_left() -> None:
    speaking = model("Gemma2", "eager")
    speaking.requires_grad_(False)
    speaking.get_input_embeddings().weight.requires_grad_(True)
    stays_trained(speaking, skip=[])
    assert speaking.lm_head.weight is speaking.get_input_embeddings().weight
    assert quantized(speaking)


def test_a_head_on_a_frozen_body_of_other_modules_is_left() -> None:
    """The body has no torch.nn.Linear: those of transformers' Conv1D, or convolutions."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": VOCABULARY, "num_labels": 8}
    judging = GPT2ForSequenceClassification(GPT2Config(n_positions=32, **sizes))
    judging.transformer.requires_grad_(False)
    stays_trained(judging)
    seeing = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 1), torch.nn.Flatten())
    seeing.requires_grad_(False).append(torch.nn.Linear(32, 8))
    stays_trained(seeing)


def biased() -> torch.nn.Module:
    """Only biases train, which a quantised layer keeps."""
    chain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    for layer in chain:
        layer.weight.requires_grad_(False)
    return chain


def placed() -> torch.nn.Module:
    """Positions are a constant table, as in Whisper."""
    chain = torch.nn.Sequential(torch.nn.Embedding(8, 64), torch.nn.Linear(64, 64))
    chain[0].requires_grad_(False)
    return chain.append(torch.nn.LayerNorm(64).requires_grad_(False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 64)),
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 64)).requires_grad_(False),
        biased,
        placed,
    ],
)
def test_models_where_nothing_is_left_to_train_are_quantised(
    make: Callable[[], torch.nn.Sequential],
) -> None:
    """As torch loads them, or frozen as a whole: nothing tells layers apart."""
    chain = make()
    warploom.patch(chain, weights=WEIGHTS)
    linear = [name for name, one in chain.named_modules() if hasattr(one, "out_features")]
    assert linear and quantized(chain) == linear


# ---- peft ----------------------------------------------------------------------------------------


LORA: dict[str, dict[str, Any]] = {
    "adapters": {},
    "of the head": {"target_modules": ["q_proj", "lm_head"]},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "a trained layer": {"modules_to_save": ["o_proj"]},
    "trained tokens": {"trainable_token_indices": [1, 2]},
    "an embedding": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "biases": {"bias": "all"},
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])  # Gemma2's head is tied
@pytest.mark.parametrize("case", LORA)
def test_what_peft_added_is_left(case: str, name: str, inference: bool) -> None:
    """Loaded for inference all of it is frozen, and still an adapter that peft may replace."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "r": 32, **LORA[case]}
    config = peft.LoraConfig(**options)
    speaking = peft.get_peft_model(model(name, "eager"), config)
    if inference:
        told = {name: id(one) for name, one in speaking.named_parameters() if "default" in name}
        speaking.requires_grad_(False)
        warploom.patch(speaking, weights=WEIGHTS)
        now = {name: id(one) for name, one in speaking.named_parameters() if "default" in name}
        assert told and told == now
        assert speaking(IDS).logits.isfinite().all()
    else:
        patch = stays_trained(speaking)
        assert any("peft trains it" in row.because for row in patch.rows)
        speaking(IDS).logits.sum().backward()
        assert all(one.grad is not None for one in trains(speaking).values())
    assert any(name.endswith("q_proj.base_layer") for name in quantized(speaking))
    assert not any("lm_head" in name for name in quantized(speaking))


def test_an_encoder_of_prompts_is_left() -> None:
    """peft's own linear layers outside of the model: no adapter of another layer."""
    peft = pytest.importorskip("peft")
    sizes = {"num_virtual_tokens": 4, "encoder_hidden_size": 32}
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", **sizes)
    speaking = peft.get_peft_model(model("Llama", "eager"), config)
    assert any("prompt_encoder" in name for name in trains(speaking))
    stays_trained(speaking)
    speaking.requires_grad_(False)
    assert quantized(speaking)
    assert not any("prompt_encoder" in name for name in quantized(speaking))

"""Adapters of peft on quantized layers: they train and are saved, and are not merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def quantized() -> Any:  # noqa: ANN401 (a model of transformers)
    speaking = model("Llama", "eager")
    warploom.patch(speaking, weights={"format": "int8", "group": 32})
    return speaking


def adapted(base: Any = None, **options: Any) -> Any:  # noqa: ANN401
    import peft

    torch.manual_seed(1)
    defaults = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(base or quantized(), peft.LoraConfig(**{**defaults, **options}))


def train(speaking: torch.nn.Module) -> set[str]:
    """Two steps; the names of what they changed."""
    before = {name: one.clone() for name, one in speaking.state_dict().items()}
    optimizer = torch.optim.AdamW(speaking.parameters(), lr=0.01)
    for _ in range(2):  # in the first one half of an adapter has no gradient
        optimizer.zero_grad()
        speaking(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    return {
        name for name, one in speaking.state_dict().items() if not torch.equal(one, before[name])
    }


def trainable(speaking: torch.nn.Module) -> set[str]:
    return {name for name, one in speaking.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("options", [{}, {"target_modules": ["q_proj", "down_proj"]}])
def test_adapters_alone_train(options: dict[str, Any]) -> None:
    """Two of them for each layer that is targeted; nothing of the quantized weights."""
    speaking = adapted(**options)
    changed = train(speaking)
    assert len(changed) == 2 * 2 * (2 if options else 7)
    assert all("lora_" in name for name in changed)
    assert changed == trainable(speaking)


@torch.no_grad()
def test_adapters_stay_where_a_patch_is_undone() -> None:
    """The layers that a GatedMLP had taken the place of came back as they were before it."""
    speaking = model("Llama", "eager")
    patch = warploom.patch(speaking)
    trained = adapted(speaking)
    for name, one in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one)
    mlp = speaking.model.layers[0].mlp
    expected, modules, state = trained(IDS).logits, {**mlp._modules}, trained.state_dict()
    patch.undo()
    mlp = speaking.model.layers[0].mlp
    assert type(mlp).__name__ == "LlamaMLP" and mlp._modules == modules
    assert type(mlp.gate_proj.base_layer) is torch.nn.Linear
    weights = {one.untyped_storage().data_ptr() for one in mlp.parameters()}
    assert len(weights) == len([*mlp.parameters()])
    assert (trained(IDS).logits - expected).abs().max() <= 0.05 * expected.abs().max()
    assert all(torch.equal(one, state[name]) for name, one in trained.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"bias": "all"}])
def test_adapters_are_saved_alone_and_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    """Into a base that is quantized alike; biases too, which are a part of a quantized layer."""
    import peft
    import safetensors.torch

    def base() -> Any:  # noqa: ANN401
        speaking = model("Llama", "eager", attention_bias=True)
        warploom.patch(speaking, weights={"format": "int8", "group": 32})
        return speaking

    speaking = adapted(base(), **options)
    train(speaking)
    speaking.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all("lora_" in name or name.endswith(".bias") for name in saved)
    assert any(name.endswith("q_proj.base_layer.bias") for name in saved) is bool(options)
    again = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, speaking.eval()(IDS).logits)


def test_adapters_of_transformers_are_saved_alone(tmp_path: Path) -> None:
    """`add_adapter` has save_pretrained write them, which is refused for whole quantized models."""
    import peft

    speaking = quantized()
    speaking.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    train(speaking)
    speaking.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    again = quantized()
    again.load_adapter(str(tmp_path))
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, speaking(IDS).logits)


@pytest.mark.parametrize("safe", [True, False])
def test_what_merges_an_adapter_is_refused(safe: bool) -> None:
    """The merged weight would be rounded again, or dropped, and the adapter with it."""
    speaking = adapted().eval()
    train(speaking)
    with torch.no_grad():
        told = speaking(IDS).logits
        for merge in (speaking.merge_adapter, speaking.merge_and_unload):
            with pytest.raises(ProblemError, match="merge adapters into the model before"):
                merge(safe_merge=safe)
            assert torch.equal(speaking(IDS).logits, told)
        speaking.unload()


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_take_a_part_of_the_weight_are_refused(init: str) -> None:
    with pytest.raises(ProblemError, match=r"a quantized weight to torch\.float32"):
        adapted(init_lora_weights=init)

"""Models with quantized layers: the ways to save one that bring it back, and those refused."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError
from warploom.integrations import saving
from warploom.integrations.checkpoints.experts import PARTS, QuantizedExperts, stacked
from warploom.nn import QuantizedLinear

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
IN_GROUPS: Any = {"format": "int8", "group": 32}


def patched() -> Any:  # noqa: ANN401 (a model of transformers)
    speaking = model("Llama", "eager")
    warploom.patch(speaking, weights=IN_GROUPS)
    return speaking


def by_hand() -> Any:  # noqa: ANN401
    speaking = model("Llama", "eager")
    linear = speaking.model.layers[1].mlp.up_proj
    speaking.model.layers[1].mlp.up_proj = QuantizedLinear.from_linear(linear, **IN_GROUPS)
    return speaking


def trainer(speaking: Any, folder: Path) -> None:  # noqa: ANN401
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True)
    Trainer(speaking, arguments).save_model()


@pytest.mark.parametrize("make", [patched, by_hand])
@pytest.mark.parametrize(
    "save",
    [
        lambda speaking, folder: speaking.save_pretrained(folder),
        lambda speaking, folder: speaking.save_pretrained(folder, state_dict=speaking.state_dict()),
        lambda speaking, folder: speaking.model.save_pretrained(folder),
        trainer,
    ],
)
@torch.no_grad()
def test_what_save_pretrained_writes_loads_bit_for_bit(
    tmp_path: Path, save: Callable[[Any, Path], None], make: Callable[[], Any]
) -> None:
    """A configuration that says nothing of layers would have their weights be random numbers."""
    from transformers import AutoModel, AutoModelForCausalLM

    speaking = make()
    assert not hasattr(speaking.config, "quantization_config")
    save(speaking, tmp_path)
    assert not hasattr(speaking.config, "quantization_config")
    assert not hasattr(speaking, "hf_quantizer")
    part = "lm_head.weight" not in "".join(map(str, _names(tmp_path)))
    kind = AutoModel if part else AutoModelForCausalLM
    again = kind.from_pretrained(tmp_path, attn_implementation="eager")
    expected = (speaking.model if part else speaking).state_dict()
    found = again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def _names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_models_without_quantized_layers_are_saved_as_ever(tmp_path: Path) -> None:
    """After other models had some, and by a patch that changes no weights, or is undone."""
    from transformers import AutoModelForCausalLM

    patched()
    speaking = model("Llama", "eager")
    expected = speaking.state_dict()
    patch = warploom.patch(speaking)
    for name in ("patched", "undone"):
        speaking.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager")
        found = again.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        patch.undo()


@torch.no_grad()
@pytest.mark.parametrize("assign", [False, True])
def test_states_bring_a_quantized_model_back(tmp_path: Path, assign: bool) -> None:
    """What the refusal advises, and files of safetensors, into a model that is patched alike."""
    first, second, third = patched(), patched(), patched()
    for layer in first.model.layers:
        layer.mlp.up_proj.get_parameter("data").add_(1)
    assert not torch.equal(first(IDS).logits, second(IDS).logits)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = getattr(torch, "load")(tmp_path / "state.pt", weights_only=True)  # noqa: B009
    second.load_state_dict(state, assign=assign)
    save_model(first, str(tmp_path / "state.safetensors"))
    load_model(third, tmp_path / "state.safetensors")
    for other in (second, third):
        assert torch.equal(first(IDS).logits, other(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_parameters_in_joined_memory_are_all_saved(tmp_path: Path, name: str) -> None:
    """Those of one storage pass for copies: safetensors refused them, accelerate left some out."""
    first, second = (joined(name) for _ in range(2))
    for one in first.parameters():
        one.copy_(torch.rand_like(one) if one.is_floating_point() else one)
    save_model(first, str(tmp_path / "state.safetensors"))
    load_model(second, tmp_path / "state.safetensors")
    assert torch.equal(first(IDS).logits, second(IDS).logits)
    Accelerator(cpu=True).save_model(first, tmp_path)
    assert _names(tmp_path) == sorted(first.state_dict())


def joined(name: str) -> Any:  # noqa: ANN401
    """A patched model whose parameters are where kernels read them."""
    speaking = model(name, "eager")
    warploom.patch(speaking, weights=IN_GROUPS if name == "Mixtral" else None)
    for module in speaking.modules():
        if isinstance(module, QuantizedExperts):  # which a first call on a GPU would do
            for part in PARTS:
                stacked(getattr(module, part))
    return speaking


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_states_are_the_memory_of_joined_parameters(name: str) -> None:
    speaking = joined(name)
    state = speaking.state_dict()
    for key, one in speaking.named_parameters():
        state[key].fill_(2)
        assert bool((one == 2).all()), key


@torch.no_grad()
def test_an_undone_patch_leaves_memory_as_it_was(tmp_path: Path) -> None:
    """Parameters stayed joined, in modules that know nothing of it: safetensors refused them."""
    speaking = model("Llama", "eager")
    expected = {key: one.clone() for key, one in speaking.state_dict().items()}
    warploom.patch(speaking).undo()
    save_model(speaking, str(tmp_path / "model.safetensors"))
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(one, expected[key]) for key, one in found.items())
    assert found.keys() == expected.keys()


def test_libraries_that_are_loaded_later_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for diffusers, which saves as transformers does."""

    class ModelMixin(torch.nn.Module):
        saved = 0

        def save_pretrained(self) -> None:
            self.saved += 1

        def push_to_hub(self) -> None:
            self.save_pretrained()

    layer = QuantizedLinear(64, 64, format="int8", group=64)
    library = types.ModuleType("modeling_utils")
    library.ModelMixin = ModelMixin  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "diffusers.models.modeling_utils", library)
    monkeypatch.setattr(saving, "_guarded", set(saving._guarded))
    made = ModelMixin()
    made.proj = torch.nn.Linear(64, 64)
    QuantizedLinear.from_linear(made.proj, "int8", 64)
    made.push_to_hub()
    assert made.saved == 1
    made.proj = layer
    for save in (made.save_pretrained, made.push_to_hub):
        with pytest.raises(ProblemError, match=r"with quantized layers \(proj\)"):
            save()
    assert made.saved == 1


@pytest.mark.parametrize(
    "save",
    [
        lambda speaking, folder: speaking.save_pretrained(folder),
        lambda speaking, folder: speaking.model.save_pretrained(folder),
        trainer,
    ],
)
def test_the_first_save_of_a_library_that_is_loaded_last_writes_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Any, Path], None]
) -> None:
    """Nothing of a layer that is put in by hand ran between the import and this save."""
    from transformers import PreTrainedModel

    speaking = by_hand()
    for method in ("save_pretrained", "push_to_hub"):
        unguarded = getattr(PreTrainedModel, method).__wrapped__
        monkeypatch.setattr(PreTrainedModel, method, unguarded)
    monkeypatch.setattr(saving, "_guarded", set())
    with pytest.raises(ProblemError, match=r"save_pretrained .*with quantized layers \(.*up_pr"):
        save(speaking, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".bin")]
    assert files == []
    save(speaking, tmp_path)  # now it is known, and says what it has
    files = [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
    assert len(files) == 1

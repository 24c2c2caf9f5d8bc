"""Adapters of peft on quantized layers: they train and are saved, and are not merged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import moe_models
import pytest
import torch
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError
from warploom.integrations.checkpoints import experts
from warploom.integrations.checkpoints.experts import QuantizedExperts

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


# ---- Through the experts of a mixture ------------------------------------------------------------


def mixture(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """One in bf16, with experts of whole groups, on which gradients of the attention depend."""
    inner = {"gpt_oss": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}[name]
    monkeypatch.setitem(moe_models.MODELS, name, {**moe_models.MODELS[name], inner: 64})
    made = moe_models.model(name).to(torch.bfloat16).eval()
    for key, one in made.named_parameters():
        if ".experts." in key:
            one.data.mul_(4)
    return made


def gradients(base: Any, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:  # noqa: ANN401
    """Those of adapters on attention layers, which are the same for all models of one kind, and the
    experts that tokens were sent to.
    """
    speaking = adapted(
        base, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0
    ).to(dtype)
    chosen = list[torch.Tensor]()
    for module in speaking.modules():
        if isinstance(module, QuantizedExperts) or hasattr(module, "is_concatenated"):
            module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    ids = moe_models.tokens(2, 11)
    speaking(input_ids=ids, labels=ids).loss.backward()
    named = {name: one.grad for name, one in speaking.named_parameters() if one.requires_grad}
    assert all("lora_" in name for name in named) and all(one is not None for one in named.values())
    return named, chosen  # type: ignore[return-value]


@pytest.mark.parametrize("weights", ["mxfp4", {"format": "int4", "group": 32}], ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_adapters_of_attention_train_through_quantized_experts(
    name: str,
    weights: str | dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As near to gradients in fp64 of dequantized experts as transformers' own in bf16 are.

    Both have the roundings of bf16 alone, and of those of the experts Warploom has the fewer: twice
    transformers' largest error is more than the sum of two such errors.
    """
    monkeypatch.setattr(experts, "refusal", lambda *given: None)
    dense = mixture(name, monkeypatch)
    made = copy.deepcopy(dense)
    options = {"format": weights} if isinstance(weights, str) else weights
    warploom.patch(made, weights={**options, "skip": ["self_attn", "lm_head"]}, attention=False)
    own = [one for one in made.modules() if isinstance(one, QuantizedExperts)]
    layers = [one for one in dense.modules() if hasattr(one, "is_concatenated")]
    assert len(own) == len(layers) == 2
    dense.set_experts_implementation("eager")
    for quantized, layer in zip(own, layers, strict=True):
        monkeypatch.setattr(quantized, "_one_by_one", None)
        for part in experts.PARTS:
            values = torch.stack([one.weight.dequantize() for one in getattr(quantized, part)])
            if part == experts.PARTS[0] and not layer.is_transposed:  # halves
                values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
            getattr(layer, part).data.copy_(values.mT if layer.is_transposed else values)
    found, chosen = gradients(made, torch.bfloat16)
    wanted, by_exact = gradients(copy.deepcopy(dense).double(), torch.float64)
    eager, by_eager = gradients(dense, torch.bfloat16)
    for one, other, third in zip(chosen, by_exact, by_eager, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    for key, exact in wanted.items():
        error, allowed = ((one[key].double() - exact).abs().max() for one in (found, eager))
        assert exact.any() and error <= 2 * allowed + 2**-8 * exact.abs().max(), key

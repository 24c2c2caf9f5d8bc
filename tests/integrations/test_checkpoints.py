"""`warploom.load_checkpoint`: whole tiny models as others quantized them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import written_layers
from checkpoint_files import CHECKPOINTS, SIZES, change, configure, save, write
from safetensors.torch import save_file
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError
from warploom.integrations.checkpoints.experts import QuantizedExperts
from warploom.nn import QuantizedLinear

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def load(folder: Path, dtype: torch.dtype | None = None) -> Any:  # noqa: ANN401
    return warploom.load_checkpoint(folder, attn_implementation="eager", dtype=dtype)


@torch.no_grad()
def plain(quantized: Any) -> Any:  # noqa: ANN401
    """A model of torch's layers, whose weights are those of the quantized one, dequantized."""
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM
    made = classes.from_config(quantized.config, attn_implementation="eager", dtype=quantized.dtype)
    state = {key: one for key, one in quantized.state_dict().items() if key in made.state_dict()}
    assert not made.load_state_dict(state, strict=False).unexpected_keys
    for name, module in quantized.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        weight = module.weight.dequantize(torch.float32)
        path, _, last = name.rpartition(".")
        if last.isdecimal():  # an expert
            made.get_parameter(path)[int(last)].copy_(weight.t())
            made.get_parameter(f"{path}_bias")[int(last)].copy_(module.bias)
        else:
            made.get_submodule(name).weight.copy_(weight)
    return made.eval()


def spoken(speaking: Any) -> torch.Tensor:  # noqa: ANN401
    found: torch.Tensor = speaking.generate(IDS, max_new_tokens=3, do_sample=False)
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_loads_whole_generates_and_is_saved(tmp_path: Path, name: str) -> None:
    """A code, scale or name that is read wrong, a layer left random, or lost where it is saved.

    Every other one is of several files.
    """
    from transformers import AutoModelForCausalLM

    shards = 1 + 2 * ([*CHECKPOINTS].index(name) % 2)
    weights = write(tmp_path / "given", name, shards)
    found = load(tmp_path / "given", torch.float32)
    assert weights
    for layer, weight in weights.items():
        module = found.get_submodule(layer)
        assert isinstance(module, QuantizedLinear)
        assert torch.equal(module.weight.dequantize(torch.float64), weight), layer
    quantized = sum(isinstance(one, QuantizedLinear) for one in found.modules())
    assert quantized == len(weights)
    assert not found.training
    other = plain(found)
    ours, theirs = found(IDS).logits, other(IDS).logits
    assert (ours - theirs).norm() <= 2**-16 * theirs.norm()
    assert torch.equal(spoken(found), spoken(other))
    found.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    expected, state = found.state_dict(), again.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], one) for key, one in expected.items())
    assert torch.equal(again(IDS).logits, found(IDS).logits)


@torch.no_grad()
def test_a_module_is_filled_where_it_is(tmp_path: Path) -> None:
    """Its type, hooks and mode stay; what shares a parameter goes on to share it."""
    weights = write(tmp_path, "gptq", tie_word_embeddings=True)
    made = model("Llama", "eager", torch.float32, tie_word_embeddings=True, **SIZES).train()
    called = []
    layer = made.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda *_: called.append(1))
    assert warploom.load_checkpoint(made, tmp_path) is made
    assert made.training
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made.lm_head.weight.dtype == torch.float32
    assert made.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    made(IDS)
    assert called == [1]
    other = load(tmp_path, torch.float32)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    expected, state = made.state_dict(), other.state_dict()
    assert all(torch.equal(state[key], one) for key, one in expected.items())
    assert len(weights) == 14


def test_adapters_train_on_a_loaded_model(tmp_path: Path) -> None:
    import peft

    write(tmp_path, "awq")
    adapted = peft.get_peft_model(
        load(tmp_path), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    given = {name for name, one in adapted.named_parameters() if one.grad is not None}
    assert len(given) == 2 * 14 and all("lora_" in name for name in given)
    with pytest.raises(ProblemError, match="merge adapters into the model before"):
        adapted.merge_adapter()


def test_experts_are_those_of_transformers_with_gradients(tmp_path: Path) -> None:
    """Each token by its own experts, clamped and weighted; the gradient of the input too."""
    write(tmp_path, "mxfp4")
    found = load(tmp_path)
    experts = found.model.layers[0].mlp.experts
    assert isinstance(experts, QuantizedExperts)
    other = plain(found).model.layers[0].mlp.experts.float()
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(1)) * 4
    chosen = torch.tensor([[0, 1]] * 3 + [[1, 0]] * 3 + [[1, 1]])
    shares = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    ours = x.bfloat16().requires_grad_()
    theirs = x.bfloat16().float().requires_grad_()
    y = experts(ours, chosen, shares.bfloat16())
    exact = other(theirs, chosen, shares.bfloat16().float())
    assert (y - exact).norm() <= 2**-6 * exact.norm()
    y.sum().backward()
    exact.sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert (ours.grad - theirs.grad).norm() <= 2**-5 * theirs.grad.norm()
    assert experts(ours[:0], chosen[:0], shares[:0].bfloat16()).shape == (0, 128)
    elsewhere = torch.tensor([[-1, 2]] * 7)  # experts of other ranks
    assert not experts(ours, elsewhere, shares.bfloat16()).any()


UP = "model.layers.1.mlp.up_proj"


def _shuffle(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.g_idx"] = tensors[f"{UP}.g_idx"].flip(0)


def _drop(key: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(key)


def _put(key: str, shape: tuple[int, ...]) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({key: torch.ones(shape)})


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "act-order": (_shuffle, f"{UP}.*(order|g_idx)"),
    "no scales": (_drop(f"{UP}.scales"), f"{UP}.*no tensor scales"),
    "no norm": (
        _drop("model.norm.weight"),
        "model.norm.weight not in .* has a parameter or buffer",
    ),
    "another": (_put("model.extra.weight", (2,)), "model.extra.weight in .* must be a parameter"),
    "expert": (
        _put("model.layers.0.mlp.experts.3.w1.weight", (2,)),
        "mixtures of experts are read into",
    ),
    "shape": (_put("model.norm.weight", (64,)), r"model.norm.weight is \[64\] .* must be \[128\]"),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"bits": 3}, "bits 3.*must be 4 or 8"),
    "method": ({"quant_method": "hqq"}, "quant_method 'hqq'.*must be one of awq, gptq"),
    "bitnet": ({"quant_method": "bitnet"}, "quant_method 'bitnet'.*must be one of"),
    "ours": ({"quant_method": "warploom"}, "from_pretrained"),
}


@pytest.mark.parametrize("case", [*TENSORS, *SETTINGS])
def test_what_is_not_taken_is_refused_by_name_and_changes_nothing(
    tmp_path: Path, case: str
) -> None:
    """A model of which some layers were converted already, and others are random."""
    write(tmp_path, "gptq")
    if case in TENSORS:
        edit, told = TENSORS[case]
        change(tmp_path, edit)
    else:
        settings, told = SETTINGS[case]
        configure(tmp_path, **settings)
    made = model("Llama", "eager", **SIZES)
    modules = dict(made.named_modules())
    state = {name: one.clone() for name, one in made.state_dict().items()}
    for load_ in (lambda: load(tmp_path), lambda: warploom.load_checkpoint(made, tmp_path)):
        with pytest.raises(ProblemError, match=f"(?s){told}"):
            load_()
    assert dict(made.named_modules()) == modules
    assert all(torch.equal(made.state_dict()[name], one) for name, one in state.items())


@pytest.mark.parametrize("lost", ["shard", "index", "tensor", "outside", "torn", "config", "plain"])
def test_damaged_folders_are_refused_by_name(tmp_path: Path, lost: str) -> None:
    write(tmp_path, "gptq", shards=2)
    index = tmp_path / "model.safetensors.index.json"
    first = tmp_path / "model-00001-of-00002.safetensors"
    listed = json.loads(index.read_text())
    if lost == "shard":
        first.unlink()
    elif lost == "index":
        index.write_text("{")
    elif lost == "tensor":
        listed["weight_map"]["more.weight"] = first.name
        index.write_text(json.dumps(listed))
    elif lost == "outside":
        listed["weight_map"]["model.norm.weight"] = "../other/model.safetensors"
        index.write_text(json.dumps(listed))
    elif lost == "torn":
        first.write_bytes(first.read_bytes()[:-100])
    elif lost == "config":
        (tmp_path / "config.json").unlink()
    else:
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        del config["quantization_config"]
        path.write_text(json.dumps(config))
    with pytest.raises(ProblemError, match=str(tmp_path)):
        load(tmp_path)


class Scaled(torch.nn.Embedding):
    """As Gemma 3's: a table that is read, and buffers that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__(8, 128)
        self.register_buffer("scale", torch.tensor(0.0), persistent=False)
        self.register_buffer("places", torch.arange(3), persistent=False)


class Embedded(torch.nn.Module):
    """A table and a quantized layer."""

    def __init__(self, places: bool = True) -> None:
        super().__init__()
        self.embed, self.q_proj = Scaled(), torch.nn.Linear(128, 128, bias=False)
        self._places = places

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, Scaled):
            torch.nn.init.normal_(module.weight)
            cast("torch.Tensor", module.scale).fill_(11.5)
            if self._places:
                cast("torch.Tensor", module.places).copy_(torch.arange(3))


def _embedded(folder: Path) -> torch.Tensor:
    """Write its checkpoint, beside which there is another file; return the table."""
    layer, _ = written_layers.gptq(128, 128, 64, symmetric=True, version=1)
    table = torch.randn(8, 128)
    save(folder, {"embed.weight": table, **{f"q_proj.{own}": one for own, one in layer.items()}})
    save_file({"adapter": torch.ones(2)}, folder / "adapter_model.safetensors")
    config = {"quantization_config": CHECKPOINTS["gptq"].config}
    (folder / "config.json").write_text(json.dumps(config))
    return table


def test_what_is_computed_draws_nothing_anew_that_was_read(tmp_path: Path) -> None:
    """transformers computes buffers where it draws parameters: Gemma 3's table was random."""
    table = _embedded(tmp_path)
    with torch.device("meta"):
        made = Embedded()
    warploom.load_checkpoint(made, tmp_path)
    assert torch.equal(made.embed.weight, table)
    assert (made.embed.scale, made.embed.places.tolist()) == (11.5, [0, 1, 2])


def test_buffers_that_nothing_computes_are_refused_and_change_nothing(tmp_path: Path) -> None:
    """Integers have no NaN: what memory held before was taken for their values."""
    _embedded(tmp_path)
    with torch.device("meta"):
        made = Embedded(places=False)
    with pytest.raises(ProblemError, match="embed: the buffers places on meta"):
        warploom.load_checkpoint(made, tmp_path)
    assert type(made.q_proj) is torch.nn.Linear and made.embed.weight.is_meta


@torch.no_grad()
def test_biases_of_zeros_that_a_layer_has_not_are_dropped(tmp_path: Path) -> None:
    """AutoGPTQ wrote them for every layer; one with numbers is the layer's."""
    write(tmp_path, "gptq")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.bias"] = torch.zeros(256).half()
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(256).half()

    change(tmp_path, edit)
    found = load(tmp_path)
    assert found.get_submodule(UP).bias is None
    bias = found.model.layers[0].mlp.up_proj.bias
    assert bias.dtype == torch.bfloat16 and bool((bias == 1).all())


def test_scales_of_activations_and_caches_are_left(tmp_path: Path) -> None:
    """Checkpoints for activations in 8 bits have them; here activations keep 16 bits."""
    write(tmp_path, "compressed-tensors, fp8 in all")
    change(tmp_path, _put(f"{UP}.input_scale", (1,)))
    change(tmp_path, _put("model.layers.0.self_attn.k_scale", (1,)))
    assert isinstance(load(tmp_path).get_submodule(UP), QuantizedLinear)


@pytest.mark.parametrize("arguments", [(3,), ("a", "b"), (torch.nn.Linear(2, 2),), ("nowhere",)])
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ProblemError, match="folder"):
        warploom.load_checkpoint(*arguments)

"""`warploom.WarploomConfig`: models are quantized as they load, saved, and loaded bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SIZES, change
from tiny_models import VOCABULARY, model
from transformers import AutoModelForCausalLM

import warploom
from warploom.errors import ProblemError
from warploom.integrations.checkpoints.quantizer import Quantize
from warploom.nn import QuantizedLinear

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def saved(folder: Path, name: str = "Llama", **sizes: Any) -> Any:  # noqa: ANN401
    """Write a model of 16 bits, and return it."""
    made = model(name, "eager", **{**SIZES, **sizes})
    made.save_pretrained(folder)
    return made


def load(folder: Path, config: warploom.WarploomConfig | None = None) -> Any:  # noqa: ANN401
    options = {} if config is None else {"quantization_config": config}  # None is no config
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral", "GptOss"])
@pytest.mark.parametrize(
    ("format", "group"), [("int4", 128), ("uint4", None), ("nvfp4", "auto"), ("int8", 64)]
)
def test_a_model_is_quantized_as_it_loads_saved_and_loaded_bit_for_bit(
    tmp_path: Path, name: str, format: str, group: int | str | None
) -> None:
    """As a patch of the whole model gives it; a bias that is lost, a scale that is cast."""
    patched = saved(tmp_path / "given", name)
    found = load(tmp_path / "given", warploom.WarploomConfig(format, group))  # type: ignore[arg-type]
    weights: Any = {"format": format, "group": group}
    warploom.patch(patched, weights=weights, attention=False, experts=False)
    expected = patched.state_dict()
    found.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, found(IDS).logits)
    for other in (found, again):
        state = other.state_dict()
        assert state.keys() == expected.keys()
        for key, one in expected.items():
            assert state[key].dtype == one.dtype
            assert torch.equal(state[key], one), key
    again.save_pretrained(tmp_path / "once more")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "saved" / file).read_bytes() == (
            tmp_path / "once more" / file
        ).read_bytes()


def test_a_weight_is_quantized_before_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 16 bits that is in memory whole first, which is what quantizing is to spare."""
    saved(tmp_path)
    read = []
    convert = Quantize.convert

    def counted(self: Quantize, given: Any, *, model: Any, **more: Any) -> Any:  # noqa: ANN401
        linears = [one for one in model.modules() if type(one) is torch.nn.Linear]
        read.append(sum(not one.weight.is_meta for one in linears))
        return convert(self, given, model=model, **more)

    monkeypatch.setattr(Quantize, "convert", counted)
    load(tmp_path, warploom.WarploomConfig())
    assert len(read) == 14
    assert max(read) <= 1  # the output head, which stays


@torch.no_grad()
def test_what_is_skipped_stays_and_is_known_to_be(tmp_path: Path) -> None:
    saved(tmp_path / "given")
    config = warploom.WarploomConfig("int8", 64, skip=["*.down_proj", "lm_head"])
    found = load(tmp_path / "given", config)
    assert type(found.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert type(found.lm_head) is torch.nn.Linear
    found.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert type(again.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert again.config.quantization_config.skip == ["*.down_proj", "lm_head"]
    assert torch.equal(again(IDS).logits, found(IDS).logits)
    everything = load(tmp_path / "given", warploom.WarploomConfig("int8", 64, skip=[]))
    assert isinstance(everything.lm_head, QuantizedLinear)


@torch.no_grad()
def test_a_head_that_is_tied_to_the_embedding_stays(tmp_path: Path) -> None:
    """It has no weight of its own in the checkpoint, and an embedding cannot be packed."""
    saved(tmp_path, tie_word_embeddings=True)
    found = load(tmp_path, warploom.WarploomConfig("int8", 64, skip=[]))
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert isinstance(found.model.layers[0].mlp.down_proj, QuantizedLinear)


@torch.no_grad()
def test_a_model_that_was_changed_is_saved_as_it_is(tmp_path: Path) -> None:
    """Layers that were quantized by hand after it was loaded are in the configuration, too."""
    saved(tmp_path / "given")
    found = load(tmp_path / "given", warploom.WarploomConfig("int8", 64, skip=["layers.1"]))
    layer = found.model.layers[1].mlp
    layer.up_proj = QuantizedLinear.from_linear(layer.up_proj, "int4", 32)
    found.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.model.layers[1].mlp.up_proj.metadata == layer.up_proj.metadata
    assert torch.equal(again(IDS).logits, found(IDS).logits)


@torch.no_grad()
def test_a_model_is_dequantized_in_place(tmp_path: Path) -> None:
    saved(tmp_path, "Qwen2")
    found = load(tmp_path, warploom.WarploomConfig("int8", 64))
    expected = found(IDS).logits
    plain = found.dequantize()
    assert not any(isinstance(one, QuantizedLinear) for one in plain.modules())
    assert torch.equal(plain(IDS).logits, expected)


def test_a_layer_whose_activation_no_class_would_have_is_not_saved(tmp_path: Path) -> None:
    made = saved(tmp_path / "given")
    linear = warploom.nn.Linear(128, 256, bias=False, dtype=torch.bfloat16, activation="silu")
    made.model.layers[0].mlp.up_proj = QuantizedLinear.from_linear(linear)
    with pytest.raises(ProblemError, match=r"up_proj.*activation 'silu'"):
        made.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "int3"}, "int3"),
        ({"group_size": 48}, "48"),
        ({"format": "int4", "symmetric": False}, "int4|symmetric"),
        ({"skip": "lm_head"}, "skip"),
        ({"scale_dtype": "floaty"}, "floaty"),
        ({"quant_method": "gptq"}, "quant_method"),
    ],
)
def test_wrong_options_are_refused_where_they_are_given(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ProblemError, match=told):
        warploom.WarploomConfig(**options)


def test_a_model_without_a_layer_to_quantize_is_refused(tmp_path: Path) -> None:
    """It would load in 16 bits, and be called quantized."""
    saved(tmp_path, hidden_size=96, intermediate_size=96, num_attention_heads=3)
    with pytest.raises(ProblemError, match="no layer can be quantized"):
        load(tmp_path, warploom.WarploomConfig("int4", 128, skip=["o_proj"]))


def _change(folder: Path, what: str) -> None:
    if what == "tensor":
        change(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.data"))
        return
    path = folder / "config.json"
    config = json.loads(path.read_text())
    quantization = config["quantization_config"]
    record = quantization["layers"][0]
    if what == "layers":
        del quantization["layers"]
    elif what == "name":
        record["modules"][0] = "model.layers.7.mlp.up_proj"
    elif what == "version":
        record["version"] = 99
    elif what == "group":
        record["group"] = 48
    else:
        del record["format"]
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("what", ["tensor", "layers", "name", "version", "group", "record"])
def test_a_saved_model_that_was_damaged_is_refused(tmp_path: Path, what: str) -> None:
    """Transformers warns of weights that are missing, and leaves what was in memory."""
    saved(tmp_path / "given")
    load(tmp_path / "given", warploom.WarploomConfig()).save_pretrained(tmp_path / "saved")
    _change(tmp_path / "saved", what)
    with pytest.raises(ProblemError):
        load(tmp_path / "saved")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "place"),
    [("Qwen2", "self_attn.k_proj.bias"), ("GptOss", "mlp.experts.gate_up_proj_bias")],
)
def test_biases_that_are_not_in_a_checkpoint_are_no_memory_of_before(
    tmp_path: Path, name: str, place: str
) -> None:
    """Transformers takes quantized layers for filled: such biases were whatever memory had."""
    made = saved(tmp_path / "given", name)
    lost, kept = (f"model.layers.{layer}.{place}" for layer in (1, 0))
    for one in (lost, kept):
        torch.nn.init.normal_(made.get_parameter(one))
    made.save_pretrained(tmp_path / "given")
    options = {"format": "int8", "group": 32}
    patch = warploom.patch(made, weights=options, attention=False)  # type: ignore[arg-type]
    assert patch.rows
    made.save_pretrained(tmp_path / "quantized")
    if name == "GptOss":  # whose experts from_pretrained does not quantize
        lost = "model.layers.1.mlp.experts.gate_up_proj.1.bias"
    else:
        change(tmp_path / "given", lambda tensors: tensors.pop(lost))
        found = load(tmp_path / "given", warploom.WarploomConfig("int8", 32))
        assert not found.get_parameter(lost).any()
        assert torch.equal(found.get_parameter(kept), made.get_parameter(kept))
    change(tmp_path / "quantized", lambda tensors: tensors.pop(lost))
    with pytest.raises(ProblemError, match=f"{re.escape(lost)} is not in the checkpoint"):
        load(tmp_path / "quantized")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    made = saved(tmp_path / "given")
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    made.save_pretrained(tmp_path / "nan")
    with pytest.raises((ProblemError, RuntimeError)):
        load(tmp_path / "nan", warploom.WarploomConfig())

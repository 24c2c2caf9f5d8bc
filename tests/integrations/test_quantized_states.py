"""A quantised layer keeps its types wherever it goes; its state loads whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mixed_samples import BF16, K, N, random, sample
from safetensors.torch import load_file, save_file

from warploom.errors import ProblemError
from warploom.integrations.frozen import FrozenParameter
from warploom.integrations.quantized_state import KEY
from warploom.nn import QuantizedLinear

State = dict[str, torch.Tensor]


def layer(seed: int = 1) -> QuantizedLinear:
    """One with all tensors that there are: a scale and a zero point for each row."""
    given = sample("uint4", None, BF16, seed=seed)
    return QuantizedLinear.from_packed(given.packed, random(N, seed=seed))


def bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().view(torch.uint8).numpy().tobytes()
        for name, tensor in (*module.named_buffers(), *module.named_parameters())
    }


# ---- Types and devices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.to("cpu", torch.float16),
        lambda module: module.type(torch.float32),
    ],
)
def test_a_model_that_is_converted_keeps_its_scales(
    convert: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    """Scales in another type are not what the kernel, which is of their type, reads."""
    model = torch.nn.Sequential(layer())
    before = model[0].weight.dequantize(torch.float64)
    assert convert(model) is model
    assert model[0].weight.channel_scales.dtype == BF16
    assert torch.equal(model[0].weight.dequantize(torch.float64), before)
    assert model[0].bias.dtype != BF16
    x = random(3, K, dtype=model[0].bias.dtype)
    assert model(x).dtype == x.dtype


def test_a_layer_moves_with_all_its_tensors() -> None:
    module = layer().to("meta", torch.float16)
    assert {tensor.device.type for tensor in (*module.buffers(), *module.parameters())} == {"meta"}
    assert module.weight.channel_scales.dtype == BF16
    back = module.to_empty(device="cpu")
    back.load_state_dict(layer().state_dict())
    assert torch.equal(
        back.weight.dequantize(torch.float64), layer().weight.dequantize(torch.float64)
    )


@pytest.fixture(params=["swap", "overwrite"])
def replacing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules swap or overwrite their parameters where they are converted, and not afterwards."""
    set_flag = getattr(torch.__future__, f"set_{request.param}_module_params_on_conversion")
    set_flag(True)
    yield
    set_flag(False)


@pytest.mark.usefixtures("replacing")
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.half(),
        lambda module: module.to(torch.float32),
        lambda module: module.to("cpu"),
        lambda module: module.share_memory(),
        lambda module: module.to_empty(device="cpu").load_state_dict(layer().state_dict()),
        lambda module: module.load_state_dict(layer().state_dict()),
        lambda module: module.load_state_dict(layer().state_dict(), assign=True),
    ],
)
def test_parameters_that_torch_replaces_stay_those_of_the_layer(
    change: Callable[[torch.nn.Module], object],
) -> None:
    """Torch made no parameter of one that it was given back, or a plain one, which trains."""
    module, expected = layer(), layer().weight.dequantize(torch.float64)
    change(module)
    module.requires_grad_()
    for name in ("data", "channel_scales", "channel_zeros"):
        parameter = module.get_parameter(name)
        assert isinstance(parameter, FrozenParameter) and not parameter.requires_grad
        assert parameter.plain.data_ptr() == parameter.data_ptr()  # what a call reads
    assert torch.equal(module.weight.dequantize(torch.float64), expected)
    assert module.weight.channel_scales.dtype == BF16
    x = random(3, K, dtype=module.bias.dtype)
    assert module(x).dtype == x.dtype


# ---- States --------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_is_tensors_that_bring_the_layer_back(tmp_path: Path, assign: bool) -> None:
    """Through a file that holds nothing but tensors, into a model that was made without weights."""
    model = torch.nn.Sequential(layer())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    made = QuantizedLinear(K, N, dtype=BF16, format="uint4", group=None, device="meta")
    other = torch.nn.Sequential(made if assign else made.to_empty(device="cpu"))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=assign)
    assert bits(other) == bits(model)
    assert torch.equal(other(random(3, K)), model(random(3, K)))


def test_a_new_layer_is_zero() -> None:
    """Not what was in memory: a model whose state lacked a layer would differ from run to run."""
    for format in ("int4", "uint4", "int8", "e4m3", "mxfp4", "ternary", "nvfp4", "mxfp8"):
        made = QuantizedLinear(K, 8, format=format)
        assert made(random(3, K, dtype=torch.float32)).count_nonzero() == 0


def told(**changes: object) -> torch.Tensor:
    """What the tensors are said to be."""
    text = json.dumps({**layer().metadata.as_dict(), **changes})
    return torch.tensor([*text.encode()], dtype=torch.uint8)


REFUSED: dict[str, tuple[Callable[[State], object], str]] = {
    "another format": (
        lambda state: state.update(QuantizedLinear(K, N).state_dict()),
        r"a weight of Metadata\(format='int4'.*must be of Metadata\(format='uint4'",
    ),
    "another version": (
        lambda state: state.update(_extra_state=told(version=1)),
        "quantized weight of version 1: must be of version 2",
    ),
    "other groups": (
        lambda state: state.update(_extra_state=told(group=128)),
        "a weight of Metadata.*group=128",
    ),
    "no metadata": (lambda state: state.pop("_extra_state"), "without _extra_state"),
    "other bytes": (
        lambda state: state.update(_extra_state=torch.zeros(3, dtype=torch.uint8)),
        "must be the metadata of a quantized weight",
    ),
    "no scales": (lambda state: state.pop("channel_scales"), "without channel_scales: must have"),
    "nothing but metadata": (
        lambda state: [state.pop(key) for key in list(state) if key != "_extra_state"],
        "without data, channel_scales, channel_zeros",
    ),
    "rows that are missing": (
        lambda state: state.update(data=state["data"][:1]),
        r"data torch.uint8 \[1, 2, 4096\]",
    ),
    "scales of another type": (
        lambda state: state.update(channel_scales=state["channel_scales"].half()),
        "channel_scales torch.float16",
    ),
    "another bias": (
        lambda state: state.update(bias=state["bias"][:8]),
        r"bias \[8\]: must be \[136\]",
    ),
    "a weight of torch's": (
        lambda state: (state.clear(), state.update(torch.nn.Linear(K, N).state_dict())),
        r"weight <tensor \[136, 256\]>: must be quantized",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("strict", [True, False])
def test_another_state_is_refused_by_name_and_nothing_of_it_is_loaded(
    name: str, strict: bool
) -> None:
    damage, said = REFUSED[name]
    state = dict(layer(seed=2).state_dict())
    damage(state)
    model = torch.nn.Sequential(layer())
    before = bits(model)
    with pytest.raises(RuntimeError, match=rf"\n\t0: .*{said}"):
        model.load_state_dict({f"0.{key}": one for key, one in state.items()}, strict=strict)
    assert bits(model) == before


def test_what_is_missing_and_too_much_is_torchs_to_tell() -> None:
    model = torch.nn.Sequential(layer())
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.data"):
        model.load_state_dict({})
    found = model.load_state_dict({}, strict=False)
    assert {"0.data", "0.bias", "0._extra_state"} <= set(found.missing_keys)
    state = dict(model.state_dict())
    del state["0.channel_scales"]
    with pytest.raises(RuntimeError, match=r'Missing key.*: "0\.channel_scales"'):
        model.load_state_dict(state)
    state = {**model.state_dict(), "0.more": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.more"):
        model.load_state_dict(state)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_without_the_weight_loads_the_rest(assign: bool) -> None:
    """Peft's bias="all" keeps biases alone; a refusal of those would lose what was trained."""
    model = torch.nn.Sequential(layer())
    before = model[0].weight.dequantize(torch.float64)
    bias = torch.full((N,), 3, dtype=BF16)
    with pytest.raises(RuntimeError, match=r'Missing key.*: "0\.data", "0\.channel_scales"'):
        model.load_state_dict({"0.bias": bias})
    found = model.load_state_dict({"0.bias": bias}, strict=False, assign=assign)
    assert found.missing_keys == [f"0.{name}" for name in (*model[0].metadata.tensors(), KEY)]
    assert torch.equal(model[0].bias, bias)
    assert torch.equal(model[0].weight.dequantize(torch.float64), before)
    weight = {
        key: one for key, one in layer(2).state_dict(prefix="0.").items() if "bias" not in key
    }
    assert model.load_state_dict(weight, strict=False, assign=assign).missing_keys == ["0.bias"]
    assert torch.equal(model[0].bias, bias)
    assert not torch.equal(model[0].weight.dequantize(torch.float64), before)
    assert not any(
        model[0].get_parameter(name).requires_grad for name in model[0].metadata.tensors()
    )


def test_a_layer_stays_of_its_kind() -> None:
    with pytest.raises(ProblemError, match="must be of Metadata"):
        layer().set_extra_state(QuantizedLinear(K, N).get_extra_state())

"""`warploom.nn.BitLinear`: transformers' layers of BitNet, and a model of them that generates."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitnet_models import bitnet, filled
from transformers.integrations.bitnet import AutoBitLinear, BitLinear

import warploom
from warploom.errors import ProblemError
from warploom.nn import BitLinear as Ours
from warploom.nn import Linear

KINDS = ("bitlinear", "autobitlinear")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """transformers compiles what its layers do to activations: a minute, for the same numbers."""
    with torch.compiler.set_stance("force_eager"):
        yield


def layer(kind: str, n: int = 72, k: int = 96, **options: Any) -> Any:  # noqa: ANN401
    made = (BitLinear if kind == "bitlinear" else AutoBitLinear)(
        k, n, **{"bias": True, "dtype": torch.float32, **options}
    )
    return filled(made)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"use_rms_norm": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_gives_what_transformers_gives(kind: str, options: dict[str, Any]) -> None:
    """In fp32, where its sums of integers are exact: the classes differ in what a scale does."""
    source = layer(kind, **options)
    made = Ours.from_bitnet(source)
    assert (made.metadata.format, made.metadata.activations) == ("ternary", "int8")
    for x in (torch.randn(5, 96), torch.randn(2, 3, 96), torch.zeros(1, 96)):
        assert torch.allclose(made(x), source(x), rtol=1e-5, atol=1e-5)
        assert torch.allclose(made(x[0]), source(x)[0], rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_input_as_if_it_were_not_rounded() -> None:
    source = layer("autobitlinear")
    made, x = Ours.from_bitnet(source), torch.randn(4, 96, requires_grad=True)
    y = made(x)
    y.sum().backward()
    assert x.grad is not None
    wanted = (source.weight * source.weight_scale).sum(0).expand(4, -1)
    assert torch.allclose(x.grad, wanted, rtol=1e-5, atol=1e-5)


def test_a_state_loads_and_kernels_are_named() -> None:
    made, other = (Ours.from_bitnet(filled(layer("autobitlinear"), seed)) for seed in (1, 2))
    x = torch.randn(3, 96)
    assert not torch.equal(made(x), other(x))
    other.load_state_dict(made.state_dict())
    assert torch.equal(made(x), other(x))
    wide = Ours.from_bitnet(layer("autobitlinear", dtype=torch.bfloat16))
    told = warploom.explain(wide, x.bfloat16(), gpu="NVIDIA H200")
    assert "int8_ternary_bf16" in told.kernel
    assert torch.equal(copy.deepcopy(made)(x), made(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_patched_generates_what_it_did(kind: str) -> None:
    model = bitnet(kind)
    tokens = torch.tensor([[1, 7, 23, 5], [1, 9, 3, 60]])
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    before, logits = model.generate(tokens, **asked), model(tokens).logits
    patch = warploom.patch(model, attention=False)
    name = "BitLinear" if kind == "bitlinear" else "AutoBitLinear"
    assert f"14 x {name}" in str(patch) and "warploom.nn.BitLinear" in str(patch)
    assert type(model.lm_head) is Linear
    assert torch.allclose(model(tokens).logits, logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(model.generate(tokens, **asked), before)
    with pytest.raises(ProblemError, match="cannot be undone"):
        patch.undo()


def test_layers_that_quantize_in_each_call_stay_and_the_report_says_why() -> None:
    other = AutoBitLinear(96, 72, online_quant=True)
    with pytest.raises(ProblemError, match=r"quantized in each call.*: load the model with"):
        Ours.from_bitnet(other)
    (row,) = warploom.patch(torch.nn.Sequential(other), attention=False).rows
    assert row.now == "as it was"
    assert "quantized in each call" in row.because


@pytest.mark.parametrize(
    ("value", "message"),
    [(2.0, "weight 2 of row 3, k 5: must be -1, 0 or 1"), (float("nan"), "weight nan of row 3")],
)
def test_a_weight_that_is_not_ternary_is_named_and_the_model_stays(
    value: float, message: str
) -> None:
    model = torch.nn.Sequential(layer("autobitlinear"), layer("autobitlinear", 64, 72))
    with torch.no_grad():
        model[1].weight[3, 5] = value
    before = list(model)
    with pytest.raises(ProblemError, match=message):
        warploom.patch(model, attention=False)
    assert list(model) == before


def test_other_layers_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"a Linear: must be a BitLinear or.*from_linear"):
        Ours.from_bitnet(torch.nn.Linear(8, 8))
    with pytest.raises(ProblemError, match="residual of a BitLinear: must be None"):
        Ours.from_bitnet(layer("bitlinear"))(torch.ones(1, 96), torch.ones(1, 72))


def test_layers_are_made_without_transformers() -> None:
    """The inherited ones had weights for activations of 16 bits, and no rms_norm."""
    linear = torch.nn.Linear(96, 72)
    made, x = Ours.from_linear(linear), torch.randn(5, 96)
    assert (made.metadata.format, made.metadata.activations) == ("ternary", "int8")
    rounded = torch.nn.functional.linear(x, made.weight.dequantize(torch.float32), linear.bias)
    assert (made(x) - rounded).norm() <= 2**-5 * rounded.norm()
    empty = Ours(96, 72)
    assert torch.equal(empty(x), torch.zeros(5, 72)) and empty.rms_norm is None
    empty.load_state_dict(made.state_dict())
    assert torch.equal(empty(x), made(x))
    assert torch.equal(Ours.from_packed(made.weight, made.bias)(x), made(x))
    for call, told in (
        (lambda: Ours.from_packed(warploom.quantize(torch.randn(72, 96), "ternary")), "for int8"),
        (lambda: Ours.from_linear(Linear(96, 72, activation="relu")), "activation 'relu'"),
    ):
        with pytest.raises(ProblemError, match=told):
            call()


def test_hooks_are_called_as_they_were_registered() -> None:
    source, heard = layer("autobitlinear"), []
    source.register_forward_hook(lambda _, __, named, ___: heard.append(named), with_kwargs=True)
    Ours.from_bitnet(source)(torch.randn(2, 96))
    assert heard == [{}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """What was written could not be read: its layers were made for activations of 16 bits."""
    model, tokens = bitnet(kind), torch.tensor([[1, 7, 23, 5]])
    warploom.patch(model, attention=False)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(type(one) is Ours for one in again.modules()) == 14
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    model = bitnet(kind, use_rms_norm=True)
    warploom.patch(model, attention=False)
    with pytest.raises(ProblemError, match="a norm of its input"):
        model.save_pretrained(tmp_path / "other")

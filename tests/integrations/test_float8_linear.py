"""`warploom.nn.Float8Linear`: transformers' FP8Linear on Warploom, with nothing copied."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import FP8Linear

import warploom
from warploom.errors import ProblemError
from warploom.integrations import float8_linear
from warploom.integrations.gated_mlp import PROJECTIONS
from warploom.nn import Float8Linear, Linear
from warploom.quantization.importers import import_block_scaled, import_weight
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.gemm.block_scales import dequantised

E4M3 = torch.float8_e4m3fn


def layer(k: int, n: int, *, bias: bool = True, **options: Any) -> torch.nn.Linear:
    """An FP8Linear as a checkpoint fills it."""
    made: Any = FP8Linear(k, n, **{"block_size": (128, 128), "has_bias": bias, **options})
    draws = torch.Generator().manual_seed(n)
    with torch.no_grad():
        made.weight.copy_(torch.randn(n, k, generator=draws).to(E4M3))
        scale = torch.rand(made.weight_scale_inv.shape, generator=draws) + 0.5
        made.weight_scale_inv.copy_(scale.to(made.weight_scale_inv.dtype))
        if bias:
            made.bias.copy_(torch.randn(n, generator=draws))
    linear: torch.nn.Linear = made
    return linear


def wide(one: Any) -> torch.Tensor:  # noqa: ANN401
    return dequantised(one.weight.detach(), one.weight_scale_inv.detach(), torch.float32)


@pytest.mark.parametrize("options", [{}, {"scale_fmt": "ue8m0"}, {"bias": False}], ids=str)
@pytest.mark.parametrize(("k", "n"), [(320, 576), (640, 192)])
def test_a_layer_computes_the_product_of_its_quantized_input(
    k: int, n: int, options: dict[str, Any]
) -> None:
    source = layer(k, n, **options)
    made = Float8Linear.from_fp8(source)
    assert made.weight is source.weight
    x = torch.randn(2, 7, k)
    of_x = dequantised(*warploom.cast(x, E4M3, block=(1, 128)), torch.float32)
    exact = torch.nn.functional.linear(of_x, wide(source), source.bias)
    assert (made(x) - exact).abs().max() <= 1e-4 * exact.abs().max()
    assert (made(x[0, 0]) - exact[0, 0]).abs().max() <= 1e-4 * exact.abs().max()
    assert made(x.bfloat16()).dtype == torch.bfloat16


def test_an_input_has_the_gradient_of_the_weight_that_is_given_back() -> None:
    source = layer(320, 576)
    x = torch.randn(5, 320, requires_grad=True)
    Float8Linear.from_fp8(source)(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, wide(source).sum(0).expand(5, -1), rtol=1e-4, atol=1e-3)
    assert source.weight.grad is None


def test_a_patch_takes_layers_over_without_a_copy_and_gives_them_back() -> None:
    first = layer(320, 576)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), layer(576, 200), torch.nn.Linear(200, 8))
    model.is_quantized = True  # type: ignore[assignment]
    before = {name: id(one) for name, one in model.named_parameters()}
    names = set(model.state_dict())
    with warploom.patch(model, attention=False) as patch:
        assert [type(one) for one in model] == [Float8Linear, torch.nn.ReLU, Float8Linear, Linear]
        assert {name: id(one) for name, one in model.named_parameters()} == before
        assert set(model.state_dict()) == names
        assert "2 x FP8Linear" in str(patch)
        assert copy.deepcopy(model)(torch.randn(3, 320)).shape == (3, 8)
    assert model[0] is first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": None}, "scales are of blocks of None"),
        ({"block_size": (64, 128)}, "scales are of blocks of"),
        ({"activation_scheme": "static"}, "one static scale"),
    ],
    ids=str,
)
def test_other_layers_stay_and_the_report_says_why(options: dict[str, Any], said: str) -> None:
    other = layer(256, 256, **options)
    with pytest.raises(ProblemError, match=said):
        Float8Linear.from_fp8(other)
    patch = warploom.patch(torch.nn.Sequential(other), attention=False)
    (row,) = patch.rows
    assert (row.now, said in row.because) == ("as it was", True)


def test_a_layer_explains_its_kernel() -> None:
    made = Float8Linear.from_fp8(layer(320, 576))
    told = warploom.explain(made, torch.randn(4, 320).bfloat16(), gpu="NVIDIA H200")
    assert "row_block" in told.kernel


def test_types_that_cannot_be_quantized_are_refused() -> None:
    with pytest.raises(ProblemError, match="must be bfloat16, float16 or float32"):
        Float8Linear.from_fp8(layer(256, 256))(torch.ones(2, 256, dtype=torch.float64))


def test_a_layer_of_a_checkpoint_shares_its_tensors() -> None:
    source: Any = layer(320, 576, bias=False)
    weight, scale = source.weight.detach(), source.weight_scale_inv.detach()
    tensors = {"up.weight": weight, "up.weight_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    read = import_block_scaled(tensors, config, name="up")
    assert (read.weight.data_ptr(), read.scale.data_ptr()) == (weight.data_ptr(), scale.data_ptr())
    made = Float8Linear.from_tensors(*read)
    assert made.bfloat16().weight.dtype == E4M3
    x = torch.randn(4, 320)
    assert torch.equal(made(x), Float8Linear.from_fp8(source)(x))
    with pytest.raises(ProblemError, match=r"e4m3 with a scale for each 128x128"):
        import_block_scaled({"weight": weight, "weight_scale_inv": torch.ones(())}, {})
    with pytest.raises(ProblemError, match=r"must be \[5, 3\] of fp32"):
        Float8Linear.from_tensors(weight, scale.t())
    with pytest.raises(ProblemError, match=r"must be \[N, K\] of torch.float8_e4m3fn"):
        Float8Linear.from_tensors(weight.float(), scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_a_scale_that_no_product_is_right_with_is_named_before_anything_is_replaced(
    value: float,
) -> None:
    """Such a scale made a block of each result NaN, or of the other sign, and nothing said so."""
    broken: Any = layer(320, 576)
    weight, scale = broken.weight.detach(), broken.weight_scale_inv.detach()
    scale[3, 1] = value
    told = rf"weight_scale_inv {value:g} at \[3, 1\]: must be finite and not negative"
    model = torch.nn.Sequential(layer(320, 320), broken)
    before = list(model)
    with pytest.raises(ProblemError, match=f"^1: {told}"):
        warploom.patch(model, attention=False)
    assert list(model) == before
    with pytest.raises(ProblemError, match=rf"^scale {value:g} at \[3, 1\]"):
        Float8Linear.from_tensors(weight, scale)
    tensors = {"up.weight": weight, "up.weight_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ProblemError, match=f"^up: fp8: {told}"):
        import_block_scaled(tensors, config, name="up")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_weight_that_is_nan_stays_nan_as_in_torch(code: int) -> None:
    """The two codes of e4m3 that are no number must not count as 480, which their bits would be.

    Formats of `warploom.quantize` have none, and refuse them by name.
    """
    weight = torch.ones(128, 256).to(E4M3)
    weight.view(torch.uint8)[3, 5] = code
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    blocks = {"up.weight": weight, "up.weight_scale_inv": torch.ones(1, 2)}
    kept = import_block_scaled(blocks, config, name="up")
    found = Float8Linear.from_tensors(*kept)(torch.ones(2, 256).bfloat16())
    assert found.isnan().nonzero().tolist() == [[0, 3], [1, 3]]
    whole = {**blocks, "up.weight_scale_inv": torch.ones(())}, {**config, "weight_block_size": None}
    for given in ((blocks, config), whole):
        with pytest.raises(ProblemError, match=rf"^up: code {code} of row 3, k 5: must not be"):
            import_weight(*given, name="up")


def test_nan_of_e8m0_is_named_and_a_scale_of_zero_is_taken() -> None:
    broken: Any = layer(320, 576, scale_fmt="ue8m0")
    broken.weight_scale_inv.detach().view(torch.uint8)[0, 2] = 255
    with pytest.raises(ProblemError, match=r"weight_scale_inv nan at \[0, 2\]"):
        Float8Linear.from_fp8(broken)
    zeros: Any = layer(128, 128, bias=False)
    zeros.weight_scale_inv.detach().zero_()
    assert not Float8Linear.from_fp8(zeros)(torch.ones(2, 128)).any()


def fp8_llama(inner: int) -> Any:  # noqa: ANN401
    """A Llama whose layers are FP8Linear with weights, as transformers loads a checkpoint."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    mlp = model.model.layers[0].mlp
    for name, k, n in (("gate", 256, inner), ("up", 256, inner), ("down", inner, 256)):
        setattr(mlp, f"{name}_proj", layer(k, n, bias=False))
    model.is_quantized = True
    return model


@torch.no_grad()
def test_a_gated_layer_of_a_checkpoint_quantizes_its_input_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """patch left LlamaMLP: x was cast for gate and for up, and torch multiplied these."""
    model = fp8_llama(384)
    mlp, names = model.model.layers[0].mlp, set(model.state_dict())
    x = torch.randn(3, 5, 256).bfloat16()
    saved = {name: one.clone() for name, one in mlp.state_dict().items()}
    layers = [Float8Linear.from_fp8(getattr(mlp, name)) for name in PROJECTIONS]
    with warploom.patch(model, attention=False) as patch:
        assert "1 x LlamaMLP" in str(patch)
        made = model.model.layers[0].mlp
        assert type(made) is warploom.nn.GatedMLP
        casts = []
        monkeypatch.setattr(
            float8_linear, "cast", lambda *of, **how: casts.append(of[0].shape) or cast(*of, **how)
        )
        found = made(x)
        assert casts == [x.shape, (3, 5, 384)]
        gate, up, down = layers
        exact = down(torch.nn.functional.silu(gate(x.float())) * up(x.float()))
        assert (found.float() - exact).abs().max() <= 2**-4 * exact.abs().max()
        assert set(model.state_dict()) == names
        assert all(torch.equal(one, saved[name]) for name, one in made.state_dict().items())
        model.config.quantization_config = None
        model.save_pretrained(tmp_path, save_original_format=False)
        written = load_file(tmp_path / "model.safetensors")
        assert set(written) == names - {"lm_head.weight"} | ({"lm_head.weight"} & set(written))
        gates = "model.layers.0.mlp.gate_proj."
        for name in ("weight", "weight_scale_inv"):
            assert torch.equal(written[gates + name], saved[f"gate_proj.{name}"])
    assert model.model.layers[0].mlp is mlp
    assert type(mlp.gate_proj) is FP8Linear


def test_an_input_of_a_gated_layer_of_fp8_has_a_gradient() -> None:
    model = fp8_llama(384)
    warploom.patch(model, attention=False)
    made, x = model.model.layers[0].mlp, torch.randn(5, 256)
    x.requires_grad_()
    made(x).sum().backward()
    wanted, x.grad = x.grad, None
    wide_x = torch.nn.functional.silu(x @ wide(made.gate_proj).t()) * (x @ wide(made.up_proj).t())
    (wide_x @ wide(made.down_proj).t()).sum().backward()
    assert wanted is not None
    assert x.grad is not None
    assert (wanted - x.grad).abs().max() <= 0.2 * x.grad.abs().max()


@pytest.mark.parametrize("change", ["width", "bias", "hook"])
@torch.no_grad()
def test_gated_layers_that_one_kernel_does_not_read_run_layer_by_layer(change: str) -> None:
    """At a width of 192 a block of scales would have rows of gate and of up."""
    model = fp8_llama(192 if change == "width" else 384)
    mlp = model.model.layers[0].mlp
    if change == "bias":
        for name in ("gate_proj", "up_proj"):
            setattr(mlp, name, layer(256, 384))
    x = torch.randn(5, 256).bfloat16()
    layers = [Float8Linear.from_fp8(getattr(mlp, name)) for name in PROJECTIONS]
    warploom.patch(model, attention=False)
    made, heard = model.model.layers[0].mlp, []
    if change == "hook":
        made.up_proj.register_forward_hook(lambda *_: heard.append(1))
    gate, up, down = layers
    found = made(x)
    assert len(heard) == (change == "hook")
    assert torch.equal(found, down(torch.nn.functional.silu(gate(x)) * up(x)))

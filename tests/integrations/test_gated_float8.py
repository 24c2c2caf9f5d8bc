"""`warploom.nn.GatedMLP` with an fp8 recipe: one function of autograd, of operands cast once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import model
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.integrations import float8_gated, gated_mlp
from warploom.integrations.float8 import Quantised, with_transpose
from warploom.integrations.gated_mlp import GATED_RECIPES
from warploom.integrations.recipes import SCHEMES, Quantization, Scheme
from warploom.nn import GatedMLP
from warploom.runtime.families._product.steps.gate import activated
from warploom.runtime.families._product.steps.gate_gradient import of_both

HIDDEN, INNER, ROWS = 64, 128, 40
BF16 = torch.bfloat16
Names = dict[str, torch.Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called for the layer: `gated` for all of it, and each cast and product."""
    seen: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> object:
            seen.append(f"gated {name}" if "gate" in keywords else name)
            return function(*arguments, **keywords)

        return counted

    for module, name in (
        (gated_mlp, "gated_float8"),
        (float8_gated, "with_transpose"),
        (float8_gated, "multiply"),
        (float8_gated, "gemm"),
    ):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return seen


def layer(recipe: str, bias: bool = False, **options: Any) -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(HIDDEN, INNER, bias, dtype=BF16, recipe=recipe, **options)


def drawn(*lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An x whose rows have different magnitudes, and the gradient of a result."""
    random = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(*lead, HIDDEN, generator=random) for _ in range(2))
    x *= torch.logspace(-2, 1, lead[-1]).unsqueeze(-1)
    return x.to(BF16).requires_grad_(), dy.to(BF16)


def wide(matrix: Quantised | None) -> torch.Tensor:
    """What a quantised matrix stands for."""
    assert matrix is not None
    values, scale = matrix.values.double(), matrix.scale.double()
    if scale.dim() == 2:
        block = 128 if scale.shape[0] < values.shape[0] else 1
        scale = scale.repeat_interleave(block, 0).repeat_interleave(128, 1)
        return values * scale[: values.shape[0], : values.shape[1]]
    return values * (scale if scale.numel() == 1 else scale.unsqueeze(-1))


def by_hand(mlp: GatedMLP, x: torch.Tensor, dy: torch.Tensor, scheme: Scheme) -> Names:
    """The results in float64 of what the recipe quantises, each intermediate one being bf16's."""
    gate, up, down = (mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
    weight = torch.cat((gate.weight, up.weight)).detach()
    x, is_exact = x.detach(), scheme.input_for_grad_weight is None

    def cast(
        one: torch.Tensor, own: Quantization, transposed: Quantization | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        row, column = with_transpose(one, own, own if transposed is None else transposed)
        return wide(row), one.double().t() if transposed is None else wide(column)

    of_x, x_t = cast(x, scheme.input, scheme.input_for_grad_weight)
    of_both_weights, both_t = cast(weight, scheme.weight, scheme.weight_for_grad_input)
    of_down, down_t = cast(down.weight.detach(), scheme.weight, scheme.weight_for_grad_input)
    bias = torch.zeros(2 * INNER) if gate.bias is None else torch.cat((gate.bias, up.bias)).detach()
    z = of_x @ of_both_weights.t() + bias
    rounded = z.to(BF16).double()
    z = z if is_exact else rounded  # by the GEMM's epilogue, or by the cast of h
    h = (activated(mlp.gate, z[:, :INNER]) * z[:, INNER:]).to(BF16)
    z = rounded
    of_h, h_t = cast(h, scheme.input, scheme.input_for_grad_weight)
    y = of_h @ of_down.t() + (0 if down.bias is None else down.bias.detach())
    of_dy, dy_t = cast(dy, scheme.grad_output, scheme.grad_output_for_grad_weight)
    dh = of_dy @ down_t.t()
    if not is_exact and gate.bias is None:  # else the epilogue has dz
        dh = dh.to(BF16).double()
    dz = of_both(dh, z, mlp.gate, "halves").to(BF16)
    of_dz, dz_t = cast(dz, scheme.grad_output, scheme.grad_output_for_grad_weight)
    if is_exact:
        dy_t, dz_t = dy.double().t(), dz.double().t()
    both = dz_t @ x_t.t()
    found = {"y": y, "x": of_dz @ both_t.t(), "gate_proj.weight": both[:INNER]}
    found |= {"up_proj.weight": both[INNER:], "down_proj.weight": dy_t @ h_t.t()}
    if gate.bias is not None:
        sums = dz.double().sum(0)
        found |= {"gate_proj.bias": sums[:INNER], "up_proj.bias": sums[INNER:]}
        found["down_proj.bias"] = dy.double().sum(0)
    return found


def of(mlp: GatedMLP, x: torch.Tensor, y: torch.Tensor) -> Names:
    """The result and gradients of a layer."""
    found = {"y": y.detach(), **{name: one.grad for name, one in mlp.named_parameters()}}
    return {**found, "x": x.grad} if x.grad is not None else found


def near(found: Names, right: Names, most: float = 0.01) -> bool:
    """Whether each differs from what is right by less than a share of its norm.

    A value that is rounded to another of 8 bits, as z was off in its last bit, is off by 2^-3.
    """
    assert found.keys() == right.keys()
    return all(
        (one.double().reshape(right[name].shape) - right[name].double()).norm()
        <= most * right[name].double().norm()
        for name, one in found.items()
    )


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", GATED_RECIPES)
def test_results_and_gradients_are_of_what_the_recipe_quantises(
    recipe: str, gate: str, calls: list[str], *, bias: bool
) -> None:
    mlp, (x, dy) = layer(recipe, bias, gate=gate), drawn(ROWS)
    y = mlp(x)
    y.backward(dy)
    right = by_hand(mlp, x, dy, SCHEMES[mlp.gate_proj.recipe])
    assert near(of(mlp, x, y), right)
    wrong = {**right, "gate_proj.weight": right["up_proj.weight"]}
    assert not near(of(mlp, x, y), wrong)
    products = calls.count("multiply") + calls.count("gemm")
    # x, h, dy and dz are cast once each; two products forward, four backward.
    fused = calls.count("gated with_transpose")
    assert fused == (0 if recipe == "rowwise_with_gw_hp" else 1 if bias else 2)
    casts = calls.count("with_transpose") + fused
    assert (calls.count("gated_float8"), casts, products) == (1, 4, 6)
    with torch.no_grad():
        assert near({"y": mlp(x)}, {"y": y.detach()}, 0.03)  # of a z that was not rounded
    assert calls.count("gated_float8") == 2


@pytest.mark.parametrize("recipe", GATED_RECIPES)
def test_gate_and_up_computed_again_give_the_same_gradients(recipe: str) -> None:
    saved, again = layer(recipe, True), layer(recipe, True, preactivation="recompute")
    results = []
    for mlp in (saved, again):
        x, dy = drawn(2, ROWS)
        y = mlp(x)
        y.backward(dy)
        results.append(of(mlp, x, y))
    assert all(torch.equal(one, results[1][name]) for name, one in results[0].items())
    x, dy = drawn(2, ROWS)
    y = checkpoint(saved, x, use_reentrant=False)
    saved.zero_grad()
    y.backward(dy)
    assert all(torch.equal(one, results[0][name]) for name, one in of(saved, x, y).items())


@pytest.mark.parametrize("wanted", ["x", "gate_proj.weight", "down_proj.weight", "down_proj.bias"])
@pytest.mark.parametrize("recipe", GATED_RECIPES)
def test_only_gradients_that_are_wanted_are_computed(recipe: str, wanted: str) -> None:
    mlp, (x, dy) = layer(recipe, True), drawn(ROWS)
    mlp(x).backward(dy)
    right = of(mlp, x, x)[wanted]
    mlp.zero_grad()
    for name, one in mlp.named_parameters():
        one.requires_grad_(name == wanted)
    x = x.detach().requires_grad_(wanted == "x")
    mlp(x).backward(dy)
    found = {"x": x.grad, **{name: one.grad for name, one in mlp.named_parameters()}}
    assert {name for name, one in found.items() if one is not None} == {wanted}
    assert near({"y": found[wanted]}, {"y": right})  # h of a z in 16 bits, or not


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("recipe", GATED_RECIPES)
def test_gradients_of_weights_are_added_to_main_grad(recipe: str, *, together: bool) -> None:
    mlp, (x, dy) = layer(recipe), drawn(ROWS)
    mlp(x).backward(dy)
    right = {name: one.grad.float() for name, one in mlp.named_parameters()}
    mlp.zero_grad(set_to_none=True)
    both = torch.ones(2 * INNER, HIDDEN)
    for index, name in enumerate(("gate", "up", "down")):
        one = mlp.get_submodule(f"{name}_proj")
        one.accumulate_into_main_grad = True
        one.weight.main_grad = torch.ones_like(one.weight, dtype=torch.float32)
        if together and name != "down":
            one.weight.main_grad = both[index * INNER : (index + 1) * INNER]
    mlp(x).backward(dy)
    for name, one in mlp.named_parameters():
        assert one.grad is None
        assert near({"y": one.main_grad - 1}, {"y": right[name]}, 0.02)


def test_weights_are_cast_again_when_either_has_changed(calls: list[str]) -> None:
    mlp, (x, _) = layer("blockwise"), drawn(ROWS)
    with torch.no_grad():
        before = mlp(x)
        assert mlp._both.quantised._entry is not None
        entry = mlp._both.quantised._entry[1]
        mlp(x)
        assert mlp._both.quantised._entry[1] is entry
        mlp.up_proj.weight.mul_(2)
        assert not torch.equal(mlp(x), before)
        assert mlp._both.quantised._entry[1] is not entry
        mlp.gate_proj.weight.mul_(2)
        after = mlp(x)
        twin = layer("blockwise")
        twin.load_state_dict(mlp.state_dict())
        assert torch.equal(twin(x), after)


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise_with_gw_hp"])
def test_compilers_see_one_function(recipe: str) -> None:
    mlp, (x, dy) = layer(recipe, True), drawn(ROWS)
    y = mlp(x)
    y.backward(dy)
    right = of(mlp, x, y)
    mlp.zero_grad()
    x.grad = None
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    y.backward(dy)
    assert near(of(mlp, x, y), right, 1e-3)


def test_layers_compute_one_by_one_what_is_not_for_one_function(calls: list[str]) -> None:
    x, _ = drawn(ROWS)
    apart = copy.deepcopy(layer("rowwise"))  # whose memory is
    delayed, mixed, narrow = layer("delayed"), layer("rowwise"), layer("tensorwise")
    mixed.down_proj.recipe = None
    narrow.up_proj.gradient_dtype = BF16
    ragged = GatedMLP(HIDDEN, 96, dtype=BF16, recipe="blockwise")
    with torch.no_grad():
        for mlp in (apart, delayed, mixed, narrow, ragged):
            assert mlp(x).isfinite().all()
    assert calls == []
    with torch.no_grad():
        GatedMLP(HIDDEN, 96, dtype=BF16, recipe="rowwise")(x)
    assert calls.count("gated_float8") == 1


def test_autocast_lowers_x() -> None:
    mlp, (x, dy) = layer("rowwise_with_gw_hp"), drawn(ROWS)
    full = x.detach().float().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = mlp(full)
    y.backward(dy)
    mlp.zero_grad()
    assert full.grad is not None and full.grad.dtype == torch.float32
    z = mlp(x)
    z.backward(dy)
    assert torch.equal(y, z) and torch.equal(full.grad, x.grad.float())


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_patch_makes_one_of_gated_layers(recipe: str, calls: list[str]) -> None:
    speaking = model("Llama", "eager", BF16)
    with warploom.patch(speaking, recipe=recipe) as patched:
        assert ("warploom.nn.GatedMLP" in repr(patched)) == (recipe != "delayed")
        mlp = speaking.model.layers[0].mlp
        assert mlp.gate_proj.recipe == recipe

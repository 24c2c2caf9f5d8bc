"""Models that train in fp8: `warploom.patch(recipe=)`, and torchao's name for the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.float8 import Float8LinearConfig, convert_to_float8_training
from warploom.integrations.float8_sharding import ShardedWeight
from warploom.integrations.recipes import RECIPES


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128)
        self.down = torch.nn.Linear(128, 64)
        self.lm_head = torch.nn.Linear(64, 32)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(torch.nn.functional.silu(self.up(x))))


def recipes(model: torch.nn.Module) -> dict[str, str | None]:
    """Those of warploom's layers, by name."""
    return {
        name: layer.recipe
        for name, layer in model.named_modules()
        if isinstance(layer, warploom.nn.Linear)
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_patched_model_trains_in_fp8_and_its_loss_falls(recipe: str) -> None:
    torch.manual_seed(0)
    model, given = Model(), {"recipe": recipe}
    patched = warploom.patch(model, **given)
    assert recipes(model) == {"up": recipe, "down": recipe, "lm_head": None}
    assert f"fp8 {recipe}" in repr(patched)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, losses = torch.randn(64, 64).bfloat16(), []
    wanted = torch.randn(64, 32).bfloat16()
    for _ in range(12):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    patched.undo()
    assert recipes(model) == {}


def test_a_filter_says_which_layers_train_in_fp8() -> None:
    model = Model()
    with warploom.patch(model, recipe="rowwise", filter=lambda layer, name: name != "up"):
        assert recipes(model) == {"up": None, "down": "rowwise", "lm_head": "rowwise"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "rowwize"}, "recipe 'rowwize'.*rowwise"),
        ({"recipe": True}, "recipe True"),
        ({"recipe": "rowwise", "weights": "int4"}, "with weights 'int4'"),
        ({"recipe": "rowwise", "linear": False}, "with linear=False"),
        ({"filter": lambda layer, name: True}, "without a recipe"),
        ({"recipe": "rowwise", "filter": "up"}, "filter 'up'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_means_nothing_is_refused_and_changes_nothing(
    given: dict[str, Any], message: str
) -> None:
    model = Model()
    with pytest.raises(ProblemError, match=message):
        warploom.patch(model, **given)
    assert recipes(model) == {}


def test_torchaos_name_converts_the_layers_that_it_is_told() -> None:
    model, x = Model(), torch.randn(8, 64).bfloat16()
    own = [*model.parameters()]
    config = Float8LinearConfig.from_recipe_name("rowwise")
    keep = {"module_filter_fn": lambda layer, name: name != "lm_head"}
    assert convert_to_float8_training(model, config=config, **keep) is model
    assert recipes(model) == {"up": "rowwise", "down": "rowwise"}
    assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
    model(x).sum().backward()
    assert all(one.grad is not None for one in own)
    layer = convert_to_float8_training(torch.nn.Linear(64, 64))
    assert isinstance(layer, warploom.nn.Linear) and layer.recipe == "tensorwise"


def test_wrong_arguments_of_torchaos_name_are_refused() -> None:
    wrong: Any = "rowwise"
    with pytest.raises(ProblemError, match=r"config .rowwise.*Float8LinearConfig"):
        convert_to_float8_training(Model(), config=wrong)
    with pytest.raises(ProblemError, match="recipe_name 'row'"):
        Float8LinearConfig.from_recipe_name("row")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"torch\.nn\.Module"):
        convert_to_float8_training(wrong)


def test_weights_that_are_gathered_in_fp8_train_as_before_without_fully_shard() -> None:
    """Their state dict is saved as that of other weights, and copies of a model train likewise."""
    torch.manual_seed(0)
    plain, other = Model(), Model()
    other.load_state_dict(plain.state_dict())
    convert_to_float8_training(plain)
    convert_to_float8_training(other, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, other)]
    for _ in range(3):
        x = torch.randn(8, 64).bfloat16()
        y, found = plain(x), other(x)
        assert torch.equal(y, found)
        y.float().square().sum().backward()
        found.float().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state, wanted = dict[str, torch.Tensor](), plain.state_dict()
    for name, one in other.state_dict().items():
        rebuild, arguments, *_ = one.__reduce_ex__(2)  # what torch.save writes
        state[name] = rebuild(*arguments)
    assert state.keys() == wanted.keys() and {type(one) for one in state.values()} == {torch.Tensor}
    assert all(torch.equal(one, wanted[name]) for name, one in state.items())
    again = copy.deepcopy(other)
    assert type(again.up.weight) is type(other.up.weight)
    with torch.no_grad():
        again.up.weight.zero_()
        assert other.up.weight.any() and not again.up.weight.any()
    other.load_state_dict(Model().state_dict())
    explained = warploom.explain(other.up, torch.randn(8, 64).bfloat16(), gpu="h200")
    assert "e4m3" in explained.kernel


GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_model_whose_weights_are_gathered_in_fp8_is_moved_to_another_type(
    dtype: torch.dtype,
) -> None:
    """The values behind a weight move with it: else the type that it tells is not theirs."""
    model = Model()
    plain, x = copy.deepcopy(model).to(dtype), torch.randn(8, 64).to(dtype)
    convert_to_float8_training(plain)
    convert_to_float8_training(model, config=GATHERED).to(dtype)
    weight: Any = model.up.weight
    assert weight.dtype == weight.own.dtype == dtype
    assert torch.equal(model(x), plain(x))
    model(x).sum().backward()
    assert weight.grad.dtype == dtype


def test_new_data_of_a_weight_that_is_gathered_in_fp8_is_computed_with() -> None:
    """As optimizers and averages of weights set it: a tensor, and what `.data` itself returns."""
    model, x = convert_to_float8_training(Model(), config=GATHERED), torch.randn(8, 64).bfloat16()
    layer: Any = model.up
    plain = torch.nn.Linear(64, 128).bfloat16()
    plain.load_state_dict(layer.state_dict())
    converted = convert_to_float8_training(plain)
    for made in (lambda: layer.weight.data * 2, lambda: layer.weight.own.detach() * 3):
        before = layer(x)
        layer.weight.data = made()
        with torch.no_grad():
            converted.weight.copy_(layer.weight.own)  # type: ignore[union-attr, operator]
        assert torch.equal(layer(x), converted(x)) and not torch.equal(layer(x), before)


def test_the_memory_of_a_weight_that_is_gathered_in_fp8_is_that_of_its_values() -> None:
    """safetensors reads it at its address, and `share_memory` moves it: both crashed before."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = convert_to_float8_training(Model(), config=GATHERED)
    state = safetensors.load(safetensors.save(model.state_dict()))
    weight: Any = model.get_parameter("up.weight")
    assert torch.equal(state["up.weight"], weight.own)
    model.share_memory()
    assert weight.own.is_shared()


def test_weights_that_are_shared_stay_shared_when_gathered_in_fp8() -> None:
    """Two layers keep one parameter; that of an embedding is gathered in its own type."""
    model, other = Model(), torch.nn.Linear(64, 128).bfloat16()
    other.weight = model.up.weight
    embedding = torch.nn.Embedding(32, 64, _weight=model.lm_head.weight)
    embedding.weight = model.lm_head.weight
    whole = torch.nn.ModuleList([model, other, embedding])
    parameters = len([*whole.parameters()])
    convert_to_float8_training(whole, config=GATHERED)
    assert len([*whole.parameters()]) == parameters
    assert whole[1].weight is model.up.weight and isinstance(model.up.weight, ShardedWeight)
    assert embedding.weight is model.lm_head.weight
    assert not isinstance(embedding.weight, ShardedWeight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True}, "one scale for a"),
        ({"enable_fsdp_float8_all_gather": 1}, "enable_fsdp_float8_all_gather 1: must be True"),
    ],
)
def test_recipes_without_one_scale_are_not_gathered_in_fp8(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProblemError, match=message):
        Float8LinearConfig(**given)

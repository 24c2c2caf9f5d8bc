"""`warploom.nn.GatedMLP`: parameters that stay what they are, and when one kernel computes both."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, model
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.integrations import gated_mlp
from warploom.nn import GatedMLP, Linear
from warploom.runtime.families.gemm.gradient_rule import Preactivation

BF16 = torch.bfloat16
IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of gemm's calls of gated layers, which run as they would on a GPU."""
    seen: list[dict[str, Any]] = []

    def gemm(x: torch.Tensor, b: torch.Tensor, **keywords: Any) -> torch.Tensor:
        seen.append(keywords)
        return warploom.gemm(x, b, **keywords)

    monkeypatch.setattr(gated_mlp, "refusal", lambda *_, **__: None)
    monkeypatch.setattr(gated_mlp, "gemm", gemm)
    return seen


def layer(gate: str = "silu", bias: bool = True) -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(64, 96, bias, dtype=BF16, gate=gate)


def by_hand(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    function = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[mlp.gate]
    return F.linear(
        function(F.linear(x, mlp.gate_proj.weight, mlp.gate_proj.bias))
        * F.linear(x, mlp.up_proj.weight, mlp.up_proj.bias),
        mlp.down_proj.weight,
        mlp.down_proj.bias,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["silu", "gelu", "relu"])
def test_one_product_computes_gate_and_up(
    gate: str, products: list[dict[str, Any]], *, bias: bool
) -> None:
    mlp, x = layer(gate, bias), torch.randn(2, 5, 64).to(BF16)
    with torch.no_grad():
        found = mlp(x)
    assert [one["gate"] for one in products] == [gate]
    torch.testing.assert_close(found, by_hand(mlp, x), rtol=2**-5, atol=2**-8)


def test_the_layers_compute_where_one_product_would_not_serve(
    products: list[dict[str, Any]],
) -> None:
    mlp, x = layer(), torch.randn(5, 64).to(BF16)
    expected = by_hand(mlp, x)
    assert torch.allclose(mlp(x), expected, rtol=2**-5, atol=2**-8)  # whose weights train
    with torch.no_grad():
        hook = mlp.up_proj.register_forward_hook(lambda *_: None)
        mlp(x)
        hook.remove()
        mlp(x[0])
        apart = copy.deepcopy(mlp)
        apart.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.clone())
        apart(x)
        other = layer()
        other.up_proj.bias = None
        other(x)
        compiled = torch.compile(mlp, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x), expected, rtol=2**-5, atol=2**-8)
    assert products == []
    with torch.no_grad():
        mlp(x)
    assert len(products) == 1


@torch.no_grad()
def test_what_a_model_has_between_the_layers_is_called_where_it_is_watched_or_another(
    products: list[dict[str, Any]],
) -> None:
    """A hook that never ran, and a function that took no part in the result."""
    speaking = model("Llama", "eager")
    warploom.patch(speaking, attention=False)
    mlp, x = speaking.model.layers[0].mlp, torch.randn(5, 64).to(BF16)
    expected = mlp(x)
    assert len(products) == 1
    seen: list[torch.Tensor] = []
    hook = mlp.act_fn.register_forward_hook(lambda *given: seen.append(given[2]))
    assert torch.equal(mlp(x), mlp.down_proj(seen[0] * mlp.up_proj(x)))
    assert len(seen) == len(products) == 1
    hook.remove()
    assert torch.equal(mlp(x), expected) and len(products) == 2
    mlp.act_fn = torch.nn.Tanh()
    assert torch.equal(mlp(x), mlp.down_proj(torch.tanh(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_parameters_stay_what_they_are_and_follow_the_model(
    products: list[dict[str, Any]],
) -> None:
    mlp, x = layer(), torch.randn(5, 64).to(BF16)
    parameters = dict(mlp.named_parameters())
    names = [
        f"{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")
    ]
    assert list(mlp.state_dict()) == names
    with torch.no_grad():
        before = mlp(x)
        mlp.gate_proj.weight.mul_(2)  # as an optimizer would
        mlp.up_proj.bias.add_(1)
        after = mlp(x)
        torch.testing.assert_close(after, by_hand(mlp, x), rtol=2**-5, atol=2**-8)
        assert not torch.equal(before, after)
        mlp.to(torch.float32).to(BF16)  # memory is joined again
        assert {name: id(one) for name, one in mlp.named_parameters()} == {
            name: id(one) for name, one in parameters.items()
        }
        assert torch.equal(mlp(x), after)
        loaded = layer()
        loaded.load_state_dict(mlp.state_dict())
        assert torch.equal(loaded(x), after)
    assert len(products) == 4


def test_copies_and_files_have_what_the_layer_has(
    tmp_path: Path, products: list[dict[str, Any]]
) -> None:
    mlp, x = layer(), torch.randn(5, 64).to(BF16)
    with torch.no_grad():
        expected = mlp(x)
        twin = copy.deepcopy(mlp)
        twin.gate_proj.weight.zero_()
        assert torch.equal(mlp(x), expected)
        assert not torch.equal(twin(x), expected)
        save_file(mlp.state_dict(), tmp_path / "mlp.safetensors")
        loaded = layer()
        loaded.load_state_dict(load_file(tmp_path / "mlp.safetensors"))
        assert torch.equal(loaded(x), expected)


@pytest.mark.parametrize(
    ("name", "gate"), [("Llama", "silu"), ("Qwen3", "silu"), ("Gemma2", "gelu_tanh")]
)
def test_patch_gates_the_layers_of_models(
    name: str, gate: str, products: list[dict[str, Any]]
) -> None:
    speaking = model(name, "eager", BF16)
    kind = type(speaking.model.layers[0].mlp).__name__
    names, parameters = list(speaking.state_dict()), [id(one) for one in speaking.parameters()]
    with torch.no_grad():
        said = speaking(IDS).logits.float()
        with warploom.patch(speaking) as patch:
            row = next(row for row in patch.rows if row.now == "warploom.nn.GatedMLP")
            assert (row.what, row.count) == (kind, 2)
            mlp = speaking.model.layers[0].mlp
            assert type(mlp) is GatedMLP and type(mlp.gate_proj) is Linear
            assert list(speaking.state_dict()) == names
            assert [id(one) for one in speaking.parameters()] == parameters
            gated = speaking(IDS).logits.float()
            assert [one["gate"] for one in products] == [gate] * 2
            assert (gated - said).abs().max() <= 0.05 * said.abs().max()
        assert type(speaking.model.layers[0].mlp).__name__ == kind
        assert [id(one) for one in speaking.parameters()] == parameters
        assert torch.equal(speaking(IDS).logits.float(), said)


def test_a_model_is_gated_again_whose_memory_is_joined() -> None:
    """Guards against layers that fell back to three GEMMs in a model that was patched before."""
    first = model("Llama", "eager", BF16)
    shared = copy.deepcopy(first, {id(one): one for one in first.parameters()})
    warploom.patch(first)
    where = [each.data_ptr() for each in first.parameters()]
    patch = warploom.patch(shared, recipe="blockwise")
    (row,) = [row for row in patch.rows if row.now == "warploom.nn.GatedMLP"]
    assert row.count == 2 and [each.data_ptr() for each in shared.parameters()] == where


def test_patch_leaves_what_kernels_would_not_gate() -> None:
    for dtype in (torch.float32,):
        patch = warploom.patch(model("Llama", "eager", dtype))
        assert all(row.now != "warploom.nn.GatedMLP" for row in patch.rows)
    hooked = model("Llama", "eager", BF16)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    (row,) = [row for row in warploom.patch(hooked).rows if row.now == "warploom.nn.GatedMLP"]
    assert row.count == 1


def test_a_layer_that_computes_something_else_is_refused() -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.down_proj, self.act_fn = torch.nn.Linear(8, 8), torch.nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
            return hidden

    with pytest.raises(ProblemError, match="a Other: must compute"):
        GatedMLP.from_torch(Other())
    with pytest.raises(ProblemError, match="gate 'swish': must be one of relu"):
        GatedMLP(8, 8, gate="swish")


# ---- Layers that train ---------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What functions of autograd were given, which run as they would on a GPU."""
    seen: list[dict[str, Any]] = []
    run = gated_mlp.gated_layer

    def recorded(*given: Any) -> torch.Tensor:
        seen.append(
            dict(zip(("x", "weights", "biases", "function", "way", "into"), given, strict=True))
        )
        return run(*given)

    monkeypatch.setattr(gated_mlp, "refusal", lambda *_, **__: None)
    monkeypatch.setattr(gated_mlp, "gated_layer", recorded)
    return seen


def assert_trains(
    mlp: GatedMLP,
    x: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    of_x: bool = True,
) -> None:
    """One step's result and gradients beside those of float64."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_(of_x)
    y = (mlp if run is None else run)(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    y.backward(dy)
    twin = copy.deepcopy(mlp).double()
    twin.zero_grad(set_to_none=True)
    exact_x = x.detach().double().requires_grad_(of_x)
    exact = by_hand(twin, exact_x)
    exact.backward(dy.double())
    pairs = [(y.detach(), exact.detach()), (x.grad, exact_x.grad)]
    parameters = zip(mlp.parameters(), twin.parameters(), strict=True)
    pairs += [(one.grad, other.grad) for one, other in parameters]
    for found, right in pairs:
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            assert found.shape == right.shape
            assert (found.double() - right).abs().max() <= 2**-5 * right.abs().max()


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["silu", "gelu", "relu"])
def test_a_layer_trains_by_one_function(
    gate: str, preactivation: Preactivation, trained: list[dict[str, Any]], *, bias: bool
) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(64, 96, bias, dtype=BF16, gate=gate, preactivation=preactivation)
    assert_trains(mlp, torch.randn(2, 5, 64).to(BF16))
    assert [(one["function"], one["way"]) for one in trained] == [(gate, preactivation)]


@pytest.mark.parametrize(
    ("frozen", "of_x"), [*itertools.product(range(1, 7), (False, True)), (7, True)]
)
def test_what_is_frozen_has_no_gradient(
    frozen: int, trained: list[dict[str, Any]], *, of_x: bool
) -> None:
    mlp = layer()
    for bit, name in enumerate(gated_mlp.PROJECTIONS):
        mlp.get_submodule(name).requires_grad_(not frozen >> bit & 1)
    assert_trains(mlp, torch.randn(7, 64).to(BF16), of_x=of_x)
    assert len(trained) == 1


def test_what_is_kept_for_the_backward_pass(trained: list[dict[str, Any]]) -> None:
    """x, gate and up, but not their product; x alone; where only down trains, the product."""
    x = torch.randn(7, 64).to(BF16)
    kept: list[int] = []

    def pack(one: torch.Tensor) -> torch.Tensor:
        kept.append(one.shape[-1])
        return one

    for preactivation, inner in (("save", 192), ("recompute", 0)):
        mlp = layer(bias=False)
        mlp.preactivation = preactivation  # type: ignore[assignment]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            mlp(x)
        assert sorted(kept) == sorted([inner, 64, 64, 64, 96])  # z, x and three weights
        kept.clear()
    for name in ("gate_proj", "up_proj"):
        mlp.get_submodule(name).requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        mlp(x)
    assert sorted(kept) == sorted([96, 64, 64, 64, 96])


def test_compiled_checkpointed_and_odd_inputs_train_alike(trained: list[dict[str, Any]]) -> None:
    mlp, x = layer(), torch.randn(7, 64).to(BF16)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    assert_trains(mlp, x, torch.compile(mlp, fullgraph=True, backend=backend))
    assert "warploom.gated_layer" in graphs[0]
    mlp.zero_grad()
    for reentrant in (False, True):
        mlp.zero_grad()
        assert_trains(mlp, x, partial(checkpoint, mlp, use_reentrant=reentrant))
    for other in (torch.randn(64, 7).to(BF16).t(), torch.randn(3, 9, 64).to(BF16)[:, ::2]):
        mlp.zero_grad()
        assert_trains(mlp, other)
    mlp.zero_grad()
    with torch.autocast("cpu", dtype=BF16):
        assert_trains(mlp, x)


def test_a_gradient_may_be_asked_for_again_but_not_differentiated(
    trained: list[dict[str, Any]],
) -> None:
    mlp, x = layer(), torch.randn(7, 64).to(BF16).requires_grad_()
    y = mlp(x)
    first, again = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    (once,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(ProblemError, match="a second derivative"):
        once.sum().backward()
    y = mlp(x)
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_added_up_in_main_grad(
    trained: list[dict[str, Any]], *, together: bool
) -> None:
    mlp, x = layer(bias=False), torch.randn(7, 64).to(BF16)
    layers = [mlp.get_submodule(name) for name in gated_mlp.PROJECTIONS]
    room = torch.zeros(192, 64)
    for one in layers:
        one.accumulate_into_main_grad = True
        one.weight.main_grad = torch.zeros(one.weight.shape)
    if together:
        layers[0].weight.main_grad, layers[1].weight.main_grad = room[:96], room[96:]
    dy = torch.randn(7, 64).to(BF16)
    for _ in range(2):
        mlp(x).backward(dy)
    assert len(trained) == 2 and all(one["into"] is not None for one in trained)
    twin = copy.deepcopy(mlp).double()
    by_hand(twin, x.double()).backward(dy.double())
    for one, name in zip(layers, gated_mlp.PROJECTIONS, strict=True):
        right = 2 * twin.get_submodule(name).weight.grad
        assert one.weight.grad is None
        assert (one.weight.main_grad - right).abs().max() <= 2**-5 * right.abs().max()
    layers[1].accumulate_into_main_grad = False  # the others' gradients go there still
    mlp(x).backward(dy)
    assert layers[0].weight.grad is None and layers[1].weight.grad is not None


def test_the_layers_train_where_one_function_would_not_serve(
    trained: list[dict[str, Any]],
) -> None:
    x = torch.randn(5, 64).to(BF16)
    mlp = layer()
    mlp.down_proj.register_full_backward_hook(lambda *_: None)
    mlp(x)
    mlp = copy.deepcopy(layer())
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.clone())  # apart
    mlp(x)
    mlp = layer()
    mlp.gate_proj.recipe = "tensorwise"
    mlp(x)
    mlp = layer()
    mlp(x[0])
    with torch.autocast("cpu", dtype=torch.float16):
        mlp(x)
    assert trained == []
    mlp(x)
    assert len(trained) == 1


def test_a_way_to_keep_that_there_is_not_is_refused() -> None:
    with pytest.raises(ProblemError, match="preactivation 'keep': must be save or recompute"):
        GatedMLP(8, 8, preactivation="keep")  # type: ignore[arg-type]


def test_memory_that_others_read_is_not_left(products: list[dict[str, Any]]) -> None:
    """Joined anew, gate and up would be no longer those of other processes."""
    shared = copy.deepcopy(layer()).share_memory()
    assert all(one.is_shared() for one in shared.parameters())
    with torch.inference_mode():
        made = copy.deepcopy(layer()).to(BF16)
        made.join()
    assert not made.gate_proj.weight.is_inference()


@torch.no_grad()
def test_a_pruned_layer_is_not_what_it_was(products: list[dict[str, Any]]) -> None:
    """Its memory begins where it did."""
    mlp, x = layer(), torch.randn(3, 64).to(BF16)
    mlp(x)
    for one in (mlp.gate_proj, mlp.up_proj):
        one.weight.data, one.bias.data = one.weight.data[:48], one.bias.data[:48]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :48].contiguous()
    assert torch.allclose(mlp(x).float(), by_hand(mlp, x).float(), rtol=2**-6, atol=2**-6)

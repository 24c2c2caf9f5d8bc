"""Gated layers on a GPU: one kernel for gate and up, in graphs too, and layers that train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from warploom.integrations.gated_mlp import GATED_RECIPES
from warploom.nn import GatedMLP
from warploom.runtime.counters import counters
from warploom.runtime.families.gemm.gradient_rule import Preactivation

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def exact(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (
        layer.weight.double() for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    x = x.double()
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_a_layer_is_two_launches(rows: int) -> None:
    torch.manual_seed(0)
    mlp, x = GatedMLP(512, 1376, device="cuda", dtype=BF16), torch.randn(rows, 512).cuda().to(BF16)
    with torch.no_grad():
        mlp(x)
        before = counters.launches
        found = mlp(x)
        assert counters.launches - before <= 4  # two products, each of two launches at most
    off = (found.double() - exact(mlp, x)).abs().max()
    assert off <= 2**-6 * exact(mlp, x).abs().max()


def test_a_captured_layer_reads_what_its_weights_are_by_then() -> None:
    mlp, x = GatedMLP(512, 1376, device="cuda", dtype=BF16), torch.randn(5, 512).cuda().to(BF16)
    with torch.no_grad():
        mlp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mlp(x)
        mlp.gate_proj.weight.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        off = (out.double() - exact(mlp, x)).abs().max()
        assert off <= 2**-6 * exact(mlp, x).abs().max()


def test_a_layer_that_moves_between_devices_is_joined_again() -> None:
    mlp = GatedMLP(64, 96, dtype=BF16).cuda()
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.numel() * 2


# ---- Layers that train ---------------------------------------------------------------------------


def trained(mlp: GatedMLP, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The result and all gradients, of x first."""
    leaf = x.clone().requires_grad_()
    mlp.zero_grad(set_to_none=True)
    y = mlp(leaf)
    y.backward(dy)
    return [y.detach(), *(one.grad for one in (leaf, *mlp.parameters()) if one.grad is not None)]


def in_float64(mlp: GatedMLP, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.double().requires_grad_()
    parameters = [one.detach().double().requires_grad_() for one in mlp.parameters()]
    layers = iter(parameters)
    read = [(next(layers), None if mlp.gate_proj.bias is None else next(layers)) for _ in range(3)]
    function = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
    }[mlp.gate]
    y = F.linear(function(F.linear(leaf, *read[0])) * F.linear(leaf, *read[1]), *read[2])
    y.backward(dy.double())
    return [y.detach(), *(one.grad for one in (leaf, *parameters) if one.grad is not None)]


def assert_close(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape
        off = (one.double() - other).abs().max() / other.abs().max()
        assert off <= 2**-5, off


def drawn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("rows", [1, 17, 300, 4096])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("gate", ["relu", "gelu", "gelu_tanh", "silu"])
def test_gradients_are_those_of_float64(
    gate: str, preactivation: Preactivation, rows: int, *, bias: bool
) -> None:
    torch.manual_seed(rows)
    dtype = torch.float16 if gate == "gelu" else BF16
    mlp = GatedMLP(
        512, 1376, bias, device="cuda", dtype=dtype, gate=gate, preactivation=preactivation
    )
    x, dy = drawn(rows, 512, dtype=dtype), drawn(rows, 512, dtype=dtype)
    launches = counters.launches
    found = trained(mlp, x, dy)
    assert counters.launches > launches
    assert_close(found, in_float64(mlp, x, dy))


def test_both_passes_copy_nothing_and_read_the_weights_in_place() -> None:
    mlp, x, dy = GatedMLP(512, 1376, device="cuda", dtype=BF16), drawn(300, 512), drawn(300, 512)
    trained(mlp, x, dy)
    copies, launches = counters.copies, counters.launches
    trained(mlp, x, dy)
    assert counters.copies == copies
    assert counters.launches - launches <= 12  # six products, each of two launches at most
    assert mlp.gate_proj.weight.grad is not None
    gate, up = mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad
    assert up is not None and up.data_ptr() == gate.data_ptr() + gate.numel() * 2


@pytest.mark.parametrize("shape", [(3, 5, 512), (2, 0, 512)], ids=str)
def test_batches_and_no_rows_train(shape: tuple[int, ...]) -> None:
    mlp = GatedMLP(512, 96, device="cuda", dtype=BF16)
    x, dy = drawn(*shape), drawn(*shape)
    found = trained(mlp, x, dy)
    if x.numel():
        assert_close(found, in_float64(mlp, x, dy))
    else:
        assert all(not one.any() for one in found[2:])


def test_inputs_and_gradients_that_lie_otherwise_train() -> None:
    mlp = GatedMLP(512, 96, device="cuda", dtype=BF16)
    x, dy = drawn(512, 40).t(), drawn(1, 512).expand(40, 512)
    assert_close(trained(mlp, x, dy), in_float64(mlp, x, dy))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers_train_alike(mode: str) -> None:
    torch._dynamo.reset()
    mlp, x, dy = GatedMLP(512, 1376, device="cuda", dtype=BF16), drawn(300, 512), drawn(300, 512)
    eager = [one.clone() for one in trained(mlp, x, dy)]
    run = torch.compile(mlp, fullgraph=True, mode=mode)
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        mlp.zero_grad(set_to_none=True)
        y = run(leaf)
        y.backward(dy)
        grads = [leaf.grad, *(one.grad for one in mlp.parameters())]
        for one, other in zip([y.detach(), *grads], eager, strict=True):
            assert one is not None and torch.equal(one, other)


def test_a_captured_step_is_replayed_on_new_inputs() -> None:
    mlp, x, dy = GatedMLP(512, 1376, device="cuda", dtype=BF16), drawn(64, 512), drawn(64, 512)
    leaf, weights = x.clone().requires_grad_(), list(mlp.parameters())

    def step() -> list[torch.Tensor]:
        y = mlp(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *weights], dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        with torch.no_grad():
            leaf.copy_(drawn(64, 512))
        dy.copy_(drawn(64, 512))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(found, in_float64(mlp, leaf.detach(), dy))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_trains(reentrant: bool) -> None:
    mlp, x, dy = GatedMLP(512, 96, device="cuda", dtype=BF16), drawn(40, 512), drawn(40, 512)
    plain = trained(mlp, x, dy)
    mlp.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    checkpoint(mlp, leaf, use_reentrant=reentrant).backward(dy)
    found = [leaf.grad, *(one.grad for one in mlp.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, plain[1:], strict=True))  # type: ignore[arg-type]


def test_gradients_are_added_up_in_main_grad() -> None:
    mlp, x, dy = GatedMLP(512, 1376, device="cuda", dtype=BF16), drawn(300, 512), drawn(300, 512)
    plain = trained(mlp, x, dy)
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        layer.accumulate_into_main_grad = True
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")  # type: ignore[assignment]
    for _ in range(2):
        assert len(trained(mlp, x, dy)) == 2
    for one, weight in zip(plain[2:], mlp.parameters(), strict=True):
        off = (weight.main_grad - 2 * one.float()).abs().max() / one.abs().max()  # type: ignore[operator]
        assert off <= 2**-6


# ---- In fp8 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("rows", [40, 384])
@pytest.mark.parametrize("recipe", GATED_RECIPES)
def test_a_recipe_computes_what_it_does_on_a_cpu(
    recipe: str, rows: int, preactivation: Preactivation
) -> None:
    """By the casts of gates, whose values few are rounded otherwise of; in few launches."""
    torch.manual_seed(0)
    options = {"dtype": BF16, "recipe": recipe, "preactivation": preactivation}
    plain, x, dy = GatedMLP(256, 512, **options), drawn(rows, 256), drawn(rows, 256)
    right = trained(plain, x.cpu(), dy.cpu())
    mlp = GatedMLP(256, 512, device="cuda", **options)
    mlp.load_state_dict(plain.state_dict())
    trained(mlp, x, dy)
    mlp.zero_grad(set_to_none=True)
    before = counters.launches
    found = trained(mlp, x, dy)
    # Products may be split in two, and casts of tensors and of rows are two: four, and of weights
    # none. Of rows without a transpose it is one.
    assert counters.launches - before <= 2 * (7 + 4)
    for one, other in zip(found, right, strict=True):
        exact = other.double().cuda()
        assert (one.double() - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("recipe", GATED_RECIPES)
def test_a_captured_step_of_a_recipe_is_replayed(recipe: str) -> None:
    mlp, dy = GatedMLP(256, 512, device="cuda", dtype=BF16, recipe=recipe), drawn(128, 256)
    leaf = drawn(128, 256).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mlp(leaf).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    mlp.zero_grad(set_to_none=True)
    leaf.grad, graph = None, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mlp(leaf).backward(dy)
    for _ in range(2):
        with torch.no_grad():
            leaf.copy_(drawn(128, 256))
            mlp.up_proj.weight.mul_(1.25)
        graph.replay()
        torch.cuda.synchronize()
        captured = [leaf.grad.clone(), *(one.grad.clone() for one in mlp.parameters())]  # type: ignore[union-attr]
        twin = GatedMLP(256, 512, device="cuda", dtype=BF16, recipe=recipe)
        twin.load_state_dict(mlp.state_dict())
        plain = trained(twin, leaf.detach(), dy)
        assert all(torch.equal(one, other) for one, other in zip(captured, plain[1:], strict=True))

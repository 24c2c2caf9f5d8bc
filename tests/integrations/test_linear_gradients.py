"""The gradients of `warploom.nn.Linear` where kernels compute them, and where they are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_bounds import ACTIVATIONS, differentiated, within

import warploom
from warploom.errors import ProblemError
from warploom.integrations import devices

IN, OUT = 40, 24


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether calls are decided as on a GPU and computed by the reference, or are torch's."""
    if request.param:
        monkeypatch.setitem(devices.reasons, -1, None)
    return bool(request.param)


def layer(**options: Any) -> warploom.nn.Linear:
    torch.manual_seed(0)
    return warploom.nn.Linear(IN, OUT, **{"dtype": torch.bfloat16, **options})


@pytest.mark.parametrize("shape", [(33, IN), (2, 5, IN), (IN,)])
@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_gradient_is_that_of_float64(
    kernel: bool, activation: str | None, preactivation: str, shape: tuple[int, ...]
) -> None:
    """One that was lost, or went to another parameter, trains a model to something else."""
    module = layer(activation=activation, preactivation=preactivation)
    x, residual = torch.randn(shape).bfloat16(), torch.randn(*shape[:-1], OUT).bfloat16()
    dy = torch.randn(*shape[:-1], OUT).bfloat16()
    leaves = [x.requires_grad_(), residual.requires_grad_(), *module.parameters()]
    module(x, residual).backward(dy)
    assert [leaf.grad is not None and leaf.grad.dtype for leaf in leaves] == [torch.bfloat16] * 4
    exact = differentiated(module, x, residual, dy)
    for leaf, (reference, magnitude) in zip(leaves, exact, strict=True):
        assert within(leaf.grad, reference, magnitude)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual"])
def test_a_gradient_can_be_wanted_alone(kernel: bool, wanted: str) -> None:
    """Frozen weights, and the first layer of a model."""
    module = layer(activation="silu").requires_grad_(False)
    x, residual = torch.randn(9, IN).bfloat16(), torch.randn(9, OUT).bfloat16()
    leaf = {"x": x, "residual": residual, **dict(module.named_parameters())}[wanted]
    leaf.requires_grad_()
    module(x, residual).float().square().sum().backward()
    assert leaf.grad is not None
    assert [one.grad for one in (x, residual, *module.parameters()) if one is not leaf] == [
        None
    ] * 3


def test_a_weights_gradient_lies_as_the_weight(kernel: bool) -> None:
    """Else each step copies it to where the optimizer reads it."""
    module = layer()
    module(torch.randn(9, IN).bfloat16()).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.is_contiguous()


def test_autocast_differentiates_parameters_of_fp32(kernel: bool) -> None:
    module, x = layer(dtype=torch.float32), torch.randn(9, IN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    y.float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    exact = x.double().sum(0).expand(OUT, IN)
    magnitude = x.double().abs().sum(0).expand(OUT, IN)
    assert within(module.weight.grad, exact, magnitude)
    assert torch.equal(module.bias.grad, torch.full((OUT,), 9.0))


def test_torch_compile_trains_it(kernel: bool) -> None:
    module = layer(activation="gelu")
    torch.compiler.reset()  # of all layers compiled before, which share one forward
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, grads = torch.randn(9, IN).bfloat16(), []
    for call in (module, compiled):
        module.zero_grad()
        call(x).float().square().sum().backward()
        grads.append([one.grad for one in module.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_micro_batches_add_up_in_main_grad(kernel: bool) -> None:
    """In bf16, the sum of many small gradients stops growing."""
    module, plain = (
        layer(activation="relu", accumulate_into_main_grad=True),
        layer(activation="relu"),
    )
    module.weight.main_grad = torch.ones(OUT, IN)
    batches = torch.randn(3, 9, IN).bfloat16()
    exact = torch.ones(OUT, IN, dtype=torch.float64)
    for x in batches:
        module(x).float().square().sum().backward()
        plain.zero_grad()
        plain(x).float().square().sum().backward()
        exact += plain.weight.grad.double()
    assert module.weight.grad is None
    assert module.bias.grad is not None
    assert (module.weight.main_grad - exact).abs().max() < 2**-6 * exact.abs().max()
    with torch.no_grad():
        module(batches[0])
    module.weight.requires_grad_(False)
    module(batches[0].requires_grad_()).sum().backward()
    assert batches[0].grad is None or module.weight.grad is None


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_no_graph_of_a_compiler_copies_main_grad(kernel: bool, recipe: str | None) -> None:
    """Gradients would be added to the copy. torch takes what a module has to be where it is."""
    fixed: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        inputs = graph.graph.find_nodes(op="placeholder")
        marked = [one for one in inputs if "_dynamo_static_input_type" in one.meta["tensor_dict"]]
        fixed.extend(one.name for one in marked)
        return graph.forward

    module = layer(accumulate_into_main_grad=True, recipe=recipe)
    module.weight.main_grad = torch.zeros(OUT, IN)
    torch._dynamo.reset()
    torch.compile(module, fullgraph=True, backend=backend)(torch.randn(9, IN).bfloat16())
    assert len([name for name in fixed if "main_grad" in name]) == 1


@pytest.mark.parametrize("wrong", [None, torch.zeros(OUT, IN).bfloat16(), torch.zeros(IN, OUT)])
def test_a_main_grad_that_does_not_fit_is_refused(kernel: bool, wrong: torch.Tensor | None) -> None:
    module = layer(accumulate_into_main_grad=True)
    if wrong is not None:
        module.weight.main_grad = wrong
    with pytest.raises(ProblemError, match=r"main_grad.*must be an fp32 tensor of the weight's"):
        module(torch.randn(9, IN).bfloat16())

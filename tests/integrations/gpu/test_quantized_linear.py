"""`warploom.nn.QuantizedLinear` on a GPU: results and gradients, in graphs, in a patched model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_bounds import ACTIVATIONS, within
from mixed_samples import random, sample
from tiny_models import model

import warploom
from warploom.nn import QuantizedLinear

pytestmark = pytest.mark.gpu
N, K = 192, 512
ROWS = (1, 16, 100, 300)  # of the table's classes, and one that is no multiple of a tile


def layer(
    format: str = "int4", group: int | None = 128, **options: Any
) -> tuple[QuantizedLinear, torch.Tensor]:
    """A layer, and its weight in float64."""
    packed, exact = sample(format, group, n=N, k=K)
    weight, bias = packed.to("cuda"), random(N, seed=3).cuda()
    return QuantizedLinear.from_packed(weight, bias, **options), exact.cuda()


def magnitude(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the terms of a result's sum add up to."""
    return x.detach().double().abs() @ weight.abs().t() + 4


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("int4", None), ("uint4", 64)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_results_and_gradients_are_those_of_float64(
    activation: str | None, format: str, group: int | None, rows: int
) -> None:
    module, weight = layer(format, group, activation=activation)
    x, residual = random(rows, K).cuda().requires_grad_(), random(rows, N, seed=4).cuda()
    assert not warploom.explain(module, x, residual).torch
    y, dy = module(x, residual), random(rows, N, seed=5).cuda()
    y.backward(dy)
    z = F.linear(x.detach().double(), weight, module.bias.detach().double()).requires_grad_()
    exact = ACTIVATIONS[activation](z)
    assert within(y.detach(), exact.detach() + residual.double(), magnitude(x, weight))
    (dz,) = torch.autograd.grad(exact, z, dy.double())
    assert within(x.grad, dz @ weight, dy.double().abs() @ weight.abs())
    assert module.bias is not None
    assert within(module.bias.grad, dz.sum(0), dy.double().abs().sum(0))


@pytest.mark.parametrize("shape", [(3, 5, K), (K,), (0, K)])
def test_any_leading_dimensions_and_none_at_all(shape: tuple[int, ...]) -> None:
    module, _ = layer()
    x = random(*shape).cuda()
    y = module(x)
    assert y.shape == (*shape[:-1], N)
    assert warploom.explain(module, x).torch is (x.numel() == 0)


@torch.no_grad()
def test_it_moves_and_is_captured_and_compiled() -> None:
    """A graph that was captured reads the weight where it lies, whatever ran in between."""
    module, _ = layer(activation="relu")
    x = random(16, K).cuda()
    expected = module(x)
    there = module.cpu().half().cuda().to(torch.bfloat16)
    assert torch.equal(there(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = there(x)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
    compiled = torch.compile(there, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)


@torch.no_grad()
def test_a_patched_model_says_what_its_rounded_weights_say() -> None:
    """Every layer of a model, against the same model with the weights that its layers have."""
    speaking = model("Llama", "eager", hidden_size=128, intermediate_size=256, head_dim=32).cuda()
    exact = model("Llama", "eager", hidden_size=128, intermediate_size=256, head_dim=32).cuda()
    ids = torch.randint(2, 64, (2, 9), device="cuda")
    warploom.patch(speaking, weights="int4")
    for name, module in speaking.named_modules():
        if isinstance(module, QuantizedLinear):
            exact.get_submodule(name).weight.copy_(module.weight.dequantize(torch.bfloat16))
    found, rough = speaking(ids).logits.float(), exact(ids).logits.float()
    right = exact.float()(ids).logits
    assert (found - right).abs().max() < 3 * (rough - right).abs().max() + 2**-6

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
from warploom.runtime.families._product.epilogue import items
from warploom.runtime.families.mixed_gemm.reference import error_share

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


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("int4", None), ("uint4", 64)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_results_and_gradients_are_those_of_float64(
    activation: str | None, format: str, group: int | None, rows: int
) -> None:
    module, weight = layer(format, group, activation=activation)
    x = (random(rows, K) / 16).cuda().requires_grad_()  # so that results are about 1
    residual, dy = (random(rows, N, seed=seed).cuda() for seed in (4, 5))
    assert not warploom.explain(module, x, residual).torch
    y = module(x, residual)
    y.backward(dy)
    with torch.no_grad():
        listed = items(bias=module.bias, activation=activation, residual=residual)
        assert error_share(y, x, module.weight, listed) <= 1
    assert module.bias is not None
    z = F.linear(x.detach().double(), weight, module.bias.detach().double()).requires_grad_()
    (dz,) = torch.autograd.grad(ACTIVATIONS[activation](z), z, dy.double())
    most = dy.double().abs()
    assert within(x.grad, dz @ weight, most @ weight.abs())
    # An activation's slope is that at sums of rounded weights: for one row nothing evens that out.
    assert within(module.bias.grad, dz.sum(0), most.sum(0), 2**-5)


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

"""Layers of quantized and 2:4 weights on a GPU: results, gradients, graphs, patched models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bitnet_models import bitnet
from linear_bounds import ACTIVATIONS, differentiated, within
from mixed_samples import random, sample
from tiny_models import model

import warploom
from warploom.nn import BitLinear, QuantizedLinear, SparseLinear
from warploom.runtime.counters import counters
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


# ---- 2:4 sparse weights --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_results_and_gradients_of_a_sparse_layer_are_those_of_float64(
    activation: str | None, rows: int
) -> None:
    """Metadata of another k, or a gradient by values whose zeros are left out, would show."""
    weight, bias = warploom.sparsify(random(N, K).cuda() / 16), random(N, seed=3).cuda()
    module = SparseLinear.from_sparse(weight, bias, activation=activation)
    x, dy = random(rows, K, seed=4).cuda().requires_grad_(), random(rows, N, seed=5).cuda()
    assert "sparse_gemm_sm90a" in warploom.explain(module, x).kernel
    y = module(x)
    y.backward(dy)
    z = F.linear(x.detach().double(), module.weight.double(), bias.double())
    magnitude = x.detach().double().abs() @ module.weight.double().abs().t() + 4
    assert within(y.detach(), ACTIVATIONS[activation](z), magnitude)
    dx, _, _, db = differentiated(module, x, torch.zeros_like(dy), dy)
    assert within(x.grad, *dx)
    assert module.bias is not None
    assert within(module.bias.grad, *db, 2**-5)  # as above


@torch.no_grad()
def test_a_patched_model_of_sparse_weights_says_what_it_said() -> None:
    patched = model("Llama", "eager", hidden_size=128, intermediate_size=256, head_dim=32).cuda()
    layers = [one for one in patched.model.modules() if isinstance(one, torch.nn.Linear)]
    for one in layers:
        one.weight.copy_(warploom.sparsify(one.weight).dense())
    plain, ids = copy.deepcopy(patched), torch.randint(2, 64, (2, 9), device="cuda")
    warploom.patch(patched, sparse="2:4")
    packed = [one for one in patched.modules() if isinstance(one, SparseLinear)]
    assert len(packed) == len(layers) == 14
    assert not warploom.explain(packed[0], random(18, 128).cuda()).torch
    found, rough = patched(ids).logits.float(), plain(ids).logits.float()
    right = plain.float()(ids).logits
    assert (found - right).abs().max() < 3 * (rough - right).abs().max() + 2**-6


# ---- BitNet --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_results_and_gradients_of_a_bitnet_layer_are_those_of_float64(rows: int) -> None:
    """A row's scale that another row gets, or codes of a wrong order along k, would show."""
    source = torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    module = BitLinear.from_linear(source)
    x, dy = random(rows, K).cuda().requires_grad_(), random(rows, N, seed=5).cuda()
    assert "int8_ternary_bf16" in warploom.explain(module, x).kernel
    y = module(x)
    y.backward(dy)
    given, weight = x.detach().double(), module.weight.dequantize(torch.float32).double()
    scale = 127 / given.abs().amax(1, keepdim=True)
    exact = (given * scale).round() / scale @ weight.t() + source.bias.double()
    # A value between two codes may be rounded to either.
    magnitude = given.abs() @ weight.abs().t() + 1
    assert within(y.detach(), exact, magnitude)
    assert within(x.grad, dy.double() @ weight, dy.double().abs() @ weight.abs())


@torch.no_grad()
def test_a_patched_bitnet_generates() -> None:
    """Each token is, to bf16, the likeliest of transformers' model in fp32."""
    with torch.compiler.set_stance("force_eager"):  # transformers compiles its rounding for minutes
        plain = bitnet("autobitlinear").bfloat16().cuda()
        patched, exact = copy.deepcopy(plain), bitnet("autobitlinear").cuda()
        # In fp32: transformers 5.17 takes a weight of another type for one whose codes are packed.
        exact.load_state_dict({name: one.float() for name, one in plain.state_dict().items()})
        warploom.patch(patched, attention=False)
        packed = [one for one in patched.modules() if isinstance(one, BitLinear)]
        assert len(packed) == 14
        wide = random(8, packed[0].in_features).cuda()
        assert "int8_ternary_bf16" in warploom.explain(packed[0], wide).kernel
        tokens = torch.tensor([[1, 7, 23, 5], [1, 9, 3, 60]], device="cuda")
        said = patched.generate(tokens, max_new_tokens=8, do_sample=False)
        assert said.shape == (2, 12)
        found, rough, right = (one(said).logits.float() for one in (patched, plain, exact))
    allowed = 4 * float((rough - right).abs().max()) + 0.02
    assert float((found - right).abs().max()) < allowed
    right, new = right[:, 3:-1], said[:, 4:, None]
    assert float((right.amax(-1) - right.gather(-1, new).squeeze(-1)).max()) < allowed


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("uint4", 64), ("mxfp4", 32)])
def test_gate_and_up_of_a_quantized_layer_are_one_kernel(
    format: str, group: int, rows: int
) -> None:
    """Guards against rows of gate that meet those of another up, and layers that run one by one."""
    speaking = model("Llama", "eager", torch.bfloat16, hidden_size=512, intermediate_size=1408)
    patch = warploom.patch(speaking.cuda(), weights={"format": format, "group": group})
    assert next(row for row in patch.rows if row.now == "warploom.nn.GatedMLP").count == 2
    mlp = speaking.model.layers[0].mlp
    expected = {key: one.clone() for key, one in mlp.state_dict().items()}
    x = random(rows, 512).cuda()
    mlp(x)
    before = counters.launches
    found = mlp(x)
    assert counters.launches - before <= 4  # two GEMMs, each of two launches at most
    apart = copy.deepcopy(mlp)
    apart.separate()
    assert all(torch.equal(apart.state_dict()[key], one) for key, one in expected.items())
    gate, up, down = (
        getattr(apart, name).weight.dequantize(torch.float64)
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    exact = (F.silu(x.double() @ gate.t()) * (x.double() @ up.t())) @ down.t()
    assert (found.double() - exact).abs().max() <= 2**-6 * exact.abs().max()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mlp(x)
    graph.replay()
    assert torch.equal(captured, found)

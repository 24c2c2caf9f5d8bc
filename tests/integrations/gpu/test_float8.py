"""fp8 on a GPU: checkpoints with block scales, torch's scaled_mm, and layers that train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

import warploom
from warploom.integrations.recipes import RECIPES
from warploom.nn import Float8Linear, GatedMLP, Linear
from warploom.runtime.counters import counters
from warploom.runtime.families.gemm.block_scales import blocks_of, dequantised

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
ScalingType: Any = F.ScalingType  # type: ignore[attr-defined]


def weight(n: int, k: int, *, e8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and its scales, which are far from each other."""
    scale = torch.randint(-3, 4, (blocks_of(n), blocks_of(k)), device="cuda").float().exp2()
    scale = scale.to(torch.float8_e8m0fnu) if e8m0 else scale * 1.25
    return torch.randn(n, k, device="cuda").to(E4M3), scale


def exact(x: torch.Tensor, one: Float8Linear) -> torch.Tensor:
    """The product of the input as it is quantized, in float64."""
    of_x = dequantised(*warploom.cast(x, E4M3, block=(1, 128)), torch.float64)
    wide = dequantised(one.weight.detach(), one.weight_scale_inv.detach(), torch.float64)
    return F.linear(of_x, wide, None if one.bias is None else one.bias.double())


def assert_close(found: torch.Tensor, right: torch.Tensor, most: float) -> None:
    off = (found.double() - right.double()).norm() / right.double().norm()
    assert off <= most, off


# ---- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 17, 130, 1025])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(576, 640), (200, 1160)], ids=str)
@torch.no_grad()
def test_a_layer_computes_the_product_of_its_quantized_input(
    n: int, k: int, dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(rows)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    one = Float8Linear.from_tensors(*weight(n, k, e8m0=rows == 17), bias)
    x = torch.randn(rows, k, device="cuda").to(dtype)
    copies, launches = counters.copies, counters.launches
    found = one(x)
    assert counters.launches > launches
    assert counters.copies == copies + (k % 16 > 0)  # TMA reads rows of multiples of 16 bytes
    assert found.dtype == dtype
    assert_close(found, exact(x, one), 2**-7)


def test_an_input_has_the_gradient_of_the_weight_that_is_given_back() -> None:
    one = Float8Linear.from_tensors(*weight(576, 640))
    x = torch.randn(33, 640, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(33, 576, device="cuda").bfloat16()
    one(x).backward(dy)
    wide = dequantised(one.weight.detach(), one.weight_scale_inv.detach(), torch.float64)
    assert x.grad is not None
    assert_close(x.grad, dy.double() @ wide, 2**-6)


@pytest.mark.parametrize("rows", [1, 64, 300])
@torch.no_grad()
def test_a_patched_gated_layer_casts_twice_and_multiplies_twice(rows: int) -> None:
    config = LlamaConfig(hidden_size=640, intermediate_size=384)
    model = torch.nn.Sequential(LlamaMLP(config)).cuda()
    for name, (n, k) in (("gate", (384, 640)), ("up", (384, 640)), ("down", (640, 384))):
        made: Any = FP8Linear(k, n, block_size=(128, 128), has_bias=False)
        made.weight.data, made.weight_scale_inv.data = weight(n, k)
        setattr(model[0], f"{name}_proj", made)
    warploom.patch(model, attention=False)
    mlp: Any = model[0]
    assert type(mlp) is GatedMLP
    x = torch.randn(rows, 640, device="cuda").bfloat16()
    mlp(x)
    launches = counters.launches
    found = mlp(x)
    assert counters.launches - launches <= 6  # two casts, two products of two launches at most
    gate, up = exact(x, mlp.gate_proj), exact(x, mlp.up_proj)
    assert_close(found, exact((F.silu(gate) * up).bfloat16(), mlp.down_proj), 2**-5)


# ---- torch's scaled_mm ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ("TensorWise", "TensorWise"),
        ("RowWise", "RowWise"),
        ("BlockWise1x128", "BlockWise128x128"),
        ("BlockWise1x128", "BlockWise1x128"),
    ],
)
def test_scaled_mm_multiplies_by_the_scales_that_it_is_told(
    of_a: str, of_b: str, rows: int
) -> None:
    n, k = 384, 640
    a = torch.randn(rows, k, device="cuda").to(E4M3)
    b = torch.randn(n, k, device="cuda").to(E4M3)
    shapes = {
        "TensorWise": ((1,), (1,)),
        "RowWise": ((rows, 1), (1, n)),
        "BlockWise1x128": ((rows, 5), (n, 5)),
        "BlockWise128x128": ((), (5, 3)),
    }
    scale_a = torch.rand(shapes[of_a][0], device="cuda") + 0.5
    scale_b = torch.rand(shapes[of_b][1], device="cuda") + 0.5
    kinds = getattr(ScalingType, of_a), getattr(ScalingType, of_b)
    found = warploom.functional.scaled_mm(a, b.t(), scale_a, kinds[0], scale_b, kinds[1])
    if of_b == "BlockWise128x128":
        wide = dequantised(b, scale_b.t(), torch.float64)
    elif of_b == "BlockWise1x128":
        wide = dequantised(b, scale_b, torch.float64)
    else:
        wide = b.double() * scale_b.double().reshape(-1, 1)
    if of_a == "BlockWise1x128":
        rows_a = dequantised(a, scale_a, torch.float64)
    else:
        rows_a = a.double() * scale_a.double().reshape(-1, 1)
    assert_close(found, rows_a @ wide.t(), 2**-7)


# ---- Recipes -------------------------------------------------------------------------------------


def trained(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of a second step, for which "delayed" has scales."""
    for _ in range(2):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
    found = [y.detach(), leaf.grad, *(one.grad for one in layer.parameters())]
    assert all(one is not None for one in found)
    return [one.cpu() for one in found if one is not None]


@pytest.mark.parametrize("rows", [48, 272])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_as_its_reference_on_a_cpu(recipe: Any, rows: int) -> None:  # noqa: ANN401
    torch.manual_seed(rows)
    layer = Linear(256, 384, dtype=torch.bfloat16, recipe=recipe)
    x, dy = torch.randn(rows, 256).bfloat16(), torch.randn(rows, 384).bfloat16()
    wanted = trained(copy.deepcopy(layer), x, dy)
    launches = counters.launches
    found = trained(layer.cuda(), x.cuda(), dy.cuda())
    assert counters.launches > launches
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 2**-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_with_a_recipe_learns(recipe: Any) -> None:  # noqa: ANN401
    """A gradient with the wrong sign, or of another layer, does not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)
    ).cuda()
    model.bfloat16()
    x, y = torch.randn(512, 256, device="cuda").bfloat16(), torch.randn(512, 128, device="cuda")
    warploom.patch(model, recipe=recipe, filter=lambda layer, name: True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]

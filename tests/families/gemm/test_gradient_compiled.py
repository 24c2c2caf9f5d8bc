"""Compilers see gemm's gradients as operators: no graph break, one compilation, the same plans."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gemm_gradients import BF16, E4M3, FP32, LAYOUTS, K, M, N, exact, held, leaf, random, scales
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import warploom
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm.call import GemmCall

Layer = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def leaves() -> dict[str, torch.Tensor]:
    return {
        "weight": leaf(random(N, K)),
        "bias": leaf(random(N)),
        "scale": leaf(scales(1)),
        "residual": leaf(random(N)),
    }


WAYS: dict[str, dict[str, Any]] = {
    "linear": {},
    "relu": {"activation": "relu"},
    "save": {"activation": "silu"},
    "recompute": {"activation": "gelu", "preactivation": "recompute"},
    "more": {"activation": "silu", "scale_a": 0.5, "out_dtype": FP32},
}


@pytest.mark.parametrize(("way", "batched"), [*((way, False) for way in WAYS), ("save", True)])
def test_any_number_of_rows_is_one_compilation(way: str, batched: bool) -> None:
    """A guard on the rows would compile anew for each length of a batch of sequences."""
    weight, bias = leaf(random(N, K)), leaf(random(N))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(x * 2, weight.t(), bias=bias, **WAYS[way]) * 3

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (6, 11, 32):
        x = leaf(random(2, rows, K) if batched else random(rows, K))
        torch._dynamo.mark_dynamic(x, x.dim() - 2)
        dd = random(*x.shape[:-1], N)
        found, expected = compiled(x), layer(x)
        assert torch.equal(found, expected)
        dd = dd.to(found.dtype)
        gradients = torch.autograd.grad(found, (x, weight, bias), dd)
        for one, other in zip(
            gradients, torch.autograd.grad(expected, (x, weight, bias), dd), strict=True
        ):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["row, col", "col, row", "batches", "broadcast b"])
def test_compiled_gradients_of_every_layout(layout: str) -> None:
    a, b = (leaf(operand) for operand in LAYOUTS[layout]())
    compiled = torch.compile(warploom.gemm, fullgraph=True, backend="aot_eager")
    d, expected = compiled(a, b), warploom.gemm(a, b)
    dd = random(*d.shape, seed=3)
    for one, other in zip(
        torch.autograd.grad(d, (a, b), dd), torch.autograd.grad(expected, (a, b), dd), strict=True
    ):
        assert torch.equal(one, other)


def test_compiled_gradients_of_scales() -> None:
    a, b = leaf(random(M, K)), leaf(random(N, K).t())
    row, one = leaf(scales(M)), leaf(scales(1))

    def layer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, scale_a=row, activation="silu", scale_d=one)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    given, dd = (a, b, row, one), random(M, N)
    found = torch.autograd.grad(compiled(a, b), given, dd)
    expected = exact(a, b, [("scale_row", row), ("activation", "silu"), ("scale", one)], dd)
    for gradient, other in zip(found, expected, strict=True):
        held(gradient, other, M * N, str(list(other.shape)))


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_layer_adds_its_weights_gradient_in_place(way: str) -> None:
    weight, bias = leaf(random(N, K)), leaf(random(N))

    def layer(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(x, weight.t(), bias=bias, main_grad=into.t(), **WAYS[way])

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    into, expected = torch.ones(N, K), torch.ones(N, K)
    for rows in (M, 2 * M):
        x = leaf(random(rows, K))
        for call, sums in ((compiled, into), (layer, expected)):
            d = call(x, sums)
            d.backward(random(rows, N).to(d.dtype))
        assert weight.grad is None
        assert torch.equal(into, expected)
    assert not torch.equal(into, torch.ones(N, K))


def test_a_compiled_quantised_layer_trains_and_raises_its_amax() -> None:
    a, b = leaf(random(32, 64).to(E4M3)), leaf(random(48, 64).to(E4M3).t())
    for one in (a, b):
        one.grad_dtype = BF16

    def layer(amax: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, scale_a=0.5, activation="silu", amax=amax, scale_d=0.25)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    amax, expected = torch.full((1,), 0.5), torch.full((1,), 0.5)
    d, other = compiled(amax), layer(expected)
    assert torch.equal(d, other)
    assert torch.equal(amax, expected)
    assert amax > 1
    d.backward(random(32, 48))
    items = [("scale", 0.5), ("activation", "silu"), ("scale", 0.25)]
    for one, wide in zip((a, b), exact(a, b, items, random(32, 48)), strict=True):
        assert one.grad is not None
        # Compilers have torch round it to the type of its tensor, whatever its grad_dtype is.
        assert (one.grad.double() - wide).square().mean() < 0.05**2 * wide.square().mean()


def test_torch_finds_no_fault_with_differentiable_operators() -> None:
    """That fakes are as results, and gradients through compilers as eager ones."""
    a, b, bias = leaf(random(M, K)), leaf(random(K, N)), leaf(random(N))
    given = (a, b, ["bias", "silu", "scale"], [bias], [0.5], BF16, "fast", None)
    torch.library.opcheck(torch.ops.warploom.gemm.default, given)
    z = torch.empty(M, N, dtype=BF16)
    kinds = ["bias", "preactivation", "silu", "amax"]
    given = (a, b, kinds, [bias], [], BF16, "fast", None)
    outputs = (["amax", "preactivation"], [torch.zeros(1), z], "save", None, None)
    torch.library.opcheck(torch.ops.warploom.gemm_outputs.default, (*given, *outputs))


def test_selective_checkpoints_keep_products_or_compute_them_again() -> None:
    weight, x = leaf(random(N, K)), leaf(random(M, K))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(torch.sin(x), weight.t(), activation="silu")

    expected = torch.autograd.grad(layer(x), (x, weight), random(M, N))
    ran: list[str] = []
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):

        def choose(ctx: Any, op: Any, *_: Any, policy: Any = policy, **__: Any) -> Any:  # noqa: ANN401
            if op.namespace == "warploom":
                ran.append(op._opname)
                return policy
            return CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, choose)
        d = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(d, (x, weight), random(M, N))
        assert all(map(torch.equal, found, expected))
    assert "gemm_outputs" in ran


@pytest.mark.parametrize("way", WAYS)
def test_an_exported_layer_is_saved_loaded_and_run(way: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(random(N, K))
            self.bias = torch.nn.Parameter(random(N))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return warploom.gemm(x, self.weight.t(), bias=self.bias, **WAYS[way])

    layer, x = Layer(), random(M, K)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for count in (M, 17):
        x = random(count, K)
        assert torch.equal(loaded(x), layer(x))


def test_fake_tensors_have_gradients_of_the_right_shapes() -> None:
    with torch._subclasses.FakeTensorMode():
        a = torch.empty(M, K, dtype=BF16, requires_grad=True)
        weight = torch.empty(N, K, dtype=BF16, requires_grad=True)
        warploom.gemm(a, weight.t(), activation="silu").sum().backward()
    assert a.grad is not None
    assert weight.grad is not None
    assert (a.grad.shape, weight.grad.shape) == (a.shape, weight.shape)
    assert weight.grad.is_contiguous()
    meta = torch.empty(M, K, dtype=BF16, device="meta", requires_grad=True)
    warploom.gemm(meta, torch.empty(K, N, dtype=BF16, device="meta")).sum().backward()
    assert meta.grad is not None
    assert meta.grad.shape == (M, K)


def test_the_operator_that_eager_modes_see_differentiates_as_a_plan_does() -> None:
    a, b, bias = leaf(random(M, K)), leaf(random(K, N)), leaf(random(N))
    items = [("bias", bias), ("activation", "silu")]
    d = operators.call(GemmCall(a, b, items, None, None, True, None, "save"))
    found = torch.autograd.grad(d, (a, b, bias), random(M, N))
    other = warploom.gemm(a, b, epilogue=items)
    expected = torch.autograd.grad(other, (a, b, bias), random(M, N))
    assert all(map(torch.equal, found, expected))

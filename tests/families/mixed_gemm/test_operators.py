"""Compilers, modes and torch.func see operators: no graph break, and the same plans."""

from __future__ import annotations

import pytest
import torch
from mixed_samples import BF16, K, N, random, sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import warploom
from warploom.errors import ProblemError
from warploom.quantization import PackedWeight


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def test_a_compiled_layer_is_one_graph_whose_weight_may_change() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, weight: PackedWeight) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return warploom.mixed_gemm(x * 2, self.weight, activation="relu") + 1

    layer = Layer(sample().packed)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = random(4, K)
    assert torch.equal(compiled(x), layer(x))
    layer.weight = sample(seed=2).packed
    assert torch.equal(compiled(x), layer(x))
    layer.weight = sample("uint4", None).packed
    assert torch.equal(compiled(x), layer(x))


def test_outputs_are_written_under_a_compiler() -> None:
    weight, _ = sample()

    def run(a: torch.Tensor, out: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return warploom.mixed_gemm(a, weight, out=out, amax=amax)

    a = random(4, K)
    out, amax, other = torch.zeros(4, N, dtype=BF16), torch.zeros(1), torch.zeros(1)
    torch.compile(run, backend="aot_eager", fullgraph=True)(a, out, amax)
    assert torch.equal(out, warploom.mixed_gemm(a, weight, amax=other))
    assert torch.equal(amax, other) and amax > 0


def test_fake_tensors_have_the_result_s_shape_and_type() -> None:
    weight, _ = sample("int4", None)
    with FakeTensorMode() as mode:
        fakes = _pytree.tree_map_only(torch.Tensor, mode.from_tensor, weight)
        d = warploom.mixed_gemm(mode.from_tensor(random(2, 3, K)), fakes)
    assert d.shape == (2, 3, N) and d.dtype == BF16
    meta = warploom.mixed_gemm(random(3, K).to("meta"), weight.to("meta"))
    assert meta.shape == (3, N) and meta.is_meta


def test_the_operator_keeps_torch_s_rules() -> None:
    weight, _ = sample("uint4", 64)
    metadata = weight.metadata
    fields = (
        metadata.format,
        metadata.group,
        metadata.scale,
        metadata.activations,
        metadata.n,
        metadata.k,
    )
    a = random(4, K).requires_grad_()
    given = (a, weight.data, None, None, *fields, ["bias"], [random(N)], [], BF16, None)
    torch.library.opcheck(torch.ops.warploom.mixed_gemm.default, given)


def test_vmap_makes_examples_rows_of_one_product() -> None:
    weight, _ = sample()
    a, rows, residual = random(5, 4, K), torch.rand(5, 4), random(5, 4, N, seed=2)

    def run(a: torch.Tensor, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        steps = [("scale_row", rows), ("residual", residual, 1.0)]
        return warploom.mixed_gemm(a, weight, epilogue=steps)

    found = torch.func.vmap(run)(a, rows, residual)
    expected = torch.stack([run(*one) for one in zip(a, rows, residual, strict=True)])
    assert torch.equal(found, expected)
    shared = torch.func.vmap(run, in_dims=(0, None, None))(a, rows[0], residual[0])
    assert torch.equal(shared[2], run(a[2], rows[0], residual[0]))


def test_a_weight_for_each_example_is_refused() -> None:
    weight, _ = sample()
    data = torch.stack([weight.data, weight.data])

    def run(a: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return warploom.mixed_gemm(a, PackedWeight(data, weight.metadata))

    with pytest.raises(ProblemError, match="one for all examples"):
        torch.func.vmap(run)(random(2, 4, K), data)

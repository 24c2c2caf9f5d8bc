"""`warploom.nn.SparseLinear`, and models whose 2:4 weights `warploom.patch` packs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import warploom
from warploom.errors import ProblemError
from warploom.nn import Linear, SparseLinear


def pruned(n: int = 72, k: int = 96, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    """A layer whose weight is 2:4 already."""
    torch.manual_seed(n + k)
    made = torch.nn.Linear(k, n, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(warploom.sparsify(made.weight).dense())
    return made


class Model(torch.nn.Module):
    """Two layers and a head, which is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = pruned(96, 64), pruned(64, 96)
        self.lm_head = torch.nn.Linear(64, 30, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(96,), (0, 96), (5, 96), (2, 3, 96)], ids=str)
def test_a_layer_gives_what_the_dense_one_gives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = pruned(dtype=dtype)
    made, x = SparseLinear.from_linear(source), torch.randn(shape).to(dtype)
    assert torch.equal(made.weight, source.weight)
    torch.testing.assert_close(made(x), source(x), rtol=2**-7, atol=2**-8)


def test_the_input_and_the_bias_have_gradients_and_the_weight_none() -> None:
    source = pruned()
    made = SparseLinear.from_linear(copy.deepcopy(source))
    x = torch.randn(4, 96).bfloat16()
    grads = []
    for layer in (source, made):
        own = x.clone().requires_grad_()
        layer(own).float().square().sum().backward()
        grads.append((own.grad, layer.bias.grad))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-5, atol=2**-3)
    assert [name for name, _ in made.named_parameters()] == ["bias"]
    made.requires_grad_()  # integers among its buffers require none


def test_types_that_no_kernel_takes_are_torchs_and_told() -> None:
    made = SparseLinear.from_linear(pruned())
    x = torch.randn(4, 96)
    wide = torch.nn.functional.linear(x, made.weight.float(), made.bias.float())
    assert torch.equal(made(x), wide)
    assert "x is torch.float32" in str(warploom.explain(made, x, gpu="NVIDIA H200"))
    told = str(warploom.explain(made, x.bfloat16(), gpu="NVIDIA H200"))
    assert "sparse_gemm_sm90a_bf16_bias" in told
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
    half = copy.deepcopy(made).half()
    assert (half.values.dtype, half.metadata.dtype) == (torch.float16, torch.int32)
    assert half(x.half()).dtype == torch.float16
    whole = copy.deepcopy(made).float()
    assert torch.equal(whole.weight, made.weight.float()) and torch.equal(whole(x), wide)


def test_a_state_is_saved_and_loaded() -> None:
    made, other = SparseLinear.from_linear(pruned()), SparseLinear.from_linear(pruned())
    other.values.zero_()
    other.load_state_dict(load(save(made.state_dict())))
    x = torch.randn(3, 96).bfloat16()
    assert torch.equal(made(x), other(x))


def test_an_activation_and_hooks_come_along() -> None:
    source = Linear.from_torch(pruned(), activation="relu")
    calls: list[int] = []
    source.register_forward_hook(lambda *_: calls.append(1))
    made = SparseLinear.from_linear(source)
    assert (made(torch.randn(3, 96).bfloat16()) >= 0).all() and calls == [1]


def test_compilers_see_one_operator() -> None:
    made = SparseLinear.from_linear(pruned())
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 96).bfloat16()
    assert torch.equal(compiled(x), made(x))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: SparseLinear(torch.zeros(8, 64)), "must be a SparseWeight"),
        (
            lambda: SparseLinear(warploom.sparsify(torch.ones(8, 64).to(torch.int8))),
            "a sparse weight of torch.int8",
        ),
        (
            lambda: SparseLinear(warploom.sparsify(torch.ones(8, 64).half()), torch.ones(7)),
            r"bias torch.float32 \[7\]",
        ),
        (
            lambda: SparseLinear.from_linear(torch.nn.Linear(64, 8)),
            "a weight of torch.float32",
        ),
        (
            lambda: SparseLinear.from_linear(torch.nn.Linear(64, 8).half()),
            "must be 2:4 sparse",
        ),
    ],
)
def test_what_is_no_sparse_layer_is_named(made: Callable[[], SparseLinear], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        made()


# ---- Models --------------------------------------------------------------------------------------


def test_a_model_is_patched_but_for_its_head() -> None:
    model, x = Model(), torch.randn(5, 64).bfloat16()
    wanted = model(x)
    patch = warploom.patch(model, attention=False, sparse="2:4")
    kinds = [type(one) for one in (model.up, model.down, model.lm_head)]
    assert kinds == [SparseLinear, SparseLinear, Linear]
    torch.testing.assert_close(model(x), wanted, rtol=2**-6, atol=2**-6)
    assert "2 x torch.nn.Linear  warploom.nn.SparseLinear, 2:4" in str(patch)
    with pytest.raises(ProblemError, match="cannot be undone"):
        patch.undo()


def test_a_layer_that_is_not_sparse_is_named_and_nothing_is_patched() -> None:
    model = Model()
    model.down = torch.nn.Linear(96, 64, dtype=torch.bfloat16)
    before = dict(model.named_modules())
    with pytest.raises(ProblemError, match=r"down: weight \[64, 96\] with .* must be 2:4 sparse"):
        warploom.patch(model, attention=False, sparse="2:4")
    assert dict(model.named_modules()) == before
    warploom.patch(model, attention=False, sparse="2:4", filter=lambda layer, name: name == "up")
    assert [type(one) for one in (model.up, model.down)] == [SparseLinear, Linear]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse": "1:4"}, "sparse '1:4'.* must be \"2:4\""),
        ({"sparse": "2:4", "weights": "int4"}, "with weights='int4'"),
        ({"sparse": "2:4", "recipe": "rowwise"}, "with recipe='rowwise'"),
        ({"sparse": "2:4", "linear": False}, "linear=False"),
        ({"sparse": "2:4", "filter": "up"}, "filter 'up'.* must be a function"),
    ],
)
def test_options_that_exclude_each_other_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        warploom.patch(Model(), attention=False, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_a_weight_that_torch_holds_as_semi_structured_is_packed() -> None:
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
    )

    source = pruned(64, 64)
    exact = source.weight.detach().clone()
    values, meta = sparse_semi_structured_from_dense_cutlass(exact)
    held = torch.sparse.SparseSemiStructuredTensorCUTLASS(
        exact.shape,
        packed=values,
        meta=meta,
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
    )
    source.weight = torch.nn.Parameter(held, requires_grad=False)
    model = torch.nn.Sequential(source)
    warploom.patch(model, attention=False, sparse="2:4")
    assert isinstance(model[0], SparseLinear) and torch.equal(model[0].weight, exact)

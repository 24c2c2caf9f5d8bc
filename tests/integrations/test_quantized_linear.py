"""`warploom.nn.QuantizedLinear` computes its weight's product: by which kernel, or by torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from importer_cases import FIXTURES, NAME, load
from linear_bounds import ACTIVATIONS
from mixed_samples import BF16, FP16, FP32, K, N, Sample, random, sample
from torch.nn.utils import prune

import warploom
from warploom.errors import ProblemError
from warploom.nn import Linear, QuantizedLinear
from warploom.quantization.importers import import_weight


def layer(given: Sample | None = None, *, bias: bool = True, **options: Any) -> QuantizedLinear:
    weight = (given or sample()).packed
    return QuantizedLinear.from_packed(weight, random(N, seed=3) if bias else None, **options)


def expected(
    module: QuantizedLinear,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer in float64, of the weight that its sample is."""
    w = sample().exact if weight is None else weight
    bias = None if module.bias is None else module.bias.double()
    y = ACTIVATIONS[module.activation](F.linear(x.double(), w, bias))
    return y if residual is None else y + residual.double()


def near(found: torch.Tensor, exact: torch.Tensor, share: float = 2**-7) -> bool:
    return bool(((found.double() - exact).abs() <= share * (exact.abs() + exact.std())).all())


# ---- What it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (K,), (2, 1, 3, K)])
@pytest.mark.parametrize(("activation", "bias"), [(None, False), (None, True), ("silu", True)])
def test_a_kernel_computes_all_of_it_in_one_call(
    products: list[torch.Tensor], activation: str | None, bias: bool, shape: tuple[int, ...]
) -> None:
    """A layer that lost its bias, its function or the residual would be another function."""
    module = layer(activation=activation, bias=bias)
    x, residual = random(*shape), random(*shape[:-1], N, seed=4)
    for beside in (None, residual, residual.float()):
        y, exact = module(x, beside), expected(module, x, beside)
        assert y.shape == exact.shape
        assert y.dtype == (torch.float32 if beside is not None and beside.dtype == FP32 else BF16)
        assert near(y, exact, 2**-8)
    assert len(products) == 3


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64])
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_without_a_kernel_torch_computes_the_same(
    activation: str | None, dtype: torch.dtype
) -> None:
    """Whatever type the bias has: a model that is converted has another than its input for once."""
    module, x = layer(activation=activation), random(2, 3, K, dtype=dtype)
    y = module(x, torch.zeros(2, 3, N, dtype=dtype))
    assert y.dtype == dtype
    assert near(y, expected(module, x))
    assert warploom.explain(module, x).torch


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)])
@pytest.mark.parametrize("kernel", [True, False])
def test_no_rows_have_a_result_and_gradients(
    request: pytest.FixtureRequest, kernel: bool, shape: tuple[int, ...]
) -> None:
    calls = request.getfixturevalue("products") if kernel else []
    module, x = layer(activation="relu"), random(*shape).requires_grad_()
    y = module(x)
    assert y.shape == (*shape[:-1], N)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert calls == []


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_are_of_all_but_the_weight(
    request: pytest.FixtureRequest, activation: str | None, kernel: bool
) -> None:
    """Adapters beside frozen weights learn through them; an optimizer finds no weight."""
    calls = request.getfixturevalue("products") if kernel else []
    module = layer(activation=activation)
    assert [name for name, one in module.named_parameters() if one.requires_grad] == ["bias"]
    x, residual = random(4, K).requires_grad_(), random(4, N, seed=4).requires_grad_()
    dy = random(4, N, seed=5)
    module(x, residual).backward(dy)
    leaves = [x, residual, module.bias]
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    expected(module, x, residual).backward(dy.double())
    for one, leaf in zip(found, leaves, strict=True):
        assert one is not None and leaf.grad is not None
        assert near(one, leaf.grad.double(), 2**-5)
    assert len(calls) == kernel


@pytest.mark.parametrize("kernel", [True, False])
def test_autocast_converts_what_comes_in(request: pytest.FixtureRequest, kernel: bool) -> None:
    calls = request.getfixturevalue("products") if kernel else []
    module, x = layer(), random(4, K, dtype=FP32)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        assert module(x).dtype == BF16
        assert near(module(x), expected(module, x))
    assert len(calls) == 2 * kernel


def test_a_residual_of_another_shape_is_refused(products: list[torch.Tensor]) -> None:
    with pytest.raises(ProblemError, match=r"residual \[136\] with input.*shape of the result"):
        layer()(random(5, K), random(N))
    assert products == []


@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("int4", None), ("uint4", None)])
@pytest.mark.parametrize("bias", [True, False])
def test_calls_that_are_recognised_compute_what_they_are_asked_for_now(
    products: list[torch.Tensor], bias: bool, format: str, group: int | None
) -> None:
    """Not what the tensors, the function or the weight were when such a call came first."""
    module = layer(sample(format, group), bias=bias).requires_grad_(False)
    for seed in range(3):
        x = random(5, K, seed=seed)
        assert near(module(x), expected(module, x, weight=sample(format, group).exact), 2**-8)
    module.activation = "relu"
    assert (module(x) >= 0).all()
    module.activation = None
    module.data.zero_()
    given = module.weight.dequantize(torch.float64)
    assert near(module(x), expected(module, x, weight=given), 2**-8)
    if module.bias is not None:
        module.bias = torch.nn.Parameter(random(N, seed=7), requires_grad=False)
        assert near(module(x), expected(module, x, weight=given), 2**-8)
        module.bias.requires_grad_()
        assert module(x).requires_grad
    assert module(x.requires_grad_()).requires_grad
    assert module(x.detach().half()).dtype == FP16
    with torch.autocast("cpu", dtype=BF16):
        assert module(random(5, K, dtype=FP32)).dtype == BF16


# ---- Which kernel --------------------------------------------------------------------------------


@torch.no_grad()
def test_explain_tells_the_kernel_of_a_gpu_that_is_named_or_why_it_is_torchs() -> None:
    module = layer(activation="gelu").to("meta")
    x = torch.empty(64, K, dtype=BF16, device="meta")
    told = warploom.explain(module, x, gpu="NVIDIA H200")
    keywords = {"bias": module.bias, "activation": "gelu", "gpu": "NVIDIA H200"}
    assert told == warploom.explain(warploom.mixed_gemm, x, module.weight, **keywords)
    assert "mixed_gemm" in told.kernel and "gelu" in told.kernel
    for given, said in (
        (x.float(), "x is torch.float32; kernels take"),
        (x[:0], r"nothing to multiply"),
    ):
        refused = warploom.explain(module, given, gpu="NVIDIA H200")
        assert refused.torch and said in refused.reason
    residual = torch.empty(64, N, dtype=torch.float64, device="meta")
    assert "residual is torch.float64" in warploom.explain(module, x, residual, gpu="H200").reason


@pytest.mark.parametrize("kernel", [True, False])
def test_compilers_take_it_whole(request: pytest.FixtureRequest, kernel: bool) -> None:
    """Compiled, and exported for any number of rows, a layer is its graph without a break."""
    if kernel:
        request.getfixturevalue("products")
    module = layer(activation="relu")
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, residual = random(5, K).requires_grad_(kernel), random(5, N, seed=4)
    y = compiled(x, residual)
    assert torch.equal(y, module(x, residual))
    if kernel:
        y.sum().backward()
        assert x.grad is not None
    rows = torch.export.Dim("rows")
    program = torch.export.export(module, (random(4, K),), dynamic_shapes=({0: rows},))
    assert torch.equal(program.module()(random(6, K)), module(random(6, K)))
    operators = {str(node.target) for node in program.graph.nodes}
    assert ("warploom.mixed_gemm.default" in operators) is kernel


def test_vmap_is_torchs() -> None:
    module, x = layer(), random(3, 4, K)
    assert near(torch.func.vmap(module)(x), expected(module, x))


# ---- How one is made -----------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.nn.Linear, Linear])
def test_a_layer_of_another_has_all_of_it_but_the_weight(source: type[torch.nn.Linear]) -> None:
    """An optimizer goes on with the bias, and hooks with their handles."""
    linear = source(K, N).eval()
    if isinstance(linear, Linear):
        linear.activation = "relu"
    ran = []
    handle = linear.register_forward_hook(lambda *_: ran.append(1))
    module = QuantizedLinear.from_linear(linear, "uint4", 64, scale_dtype=FP16)
    assert module.bias is linear.bias
    assert not module.training
    x = random(5, K, dtype=FP32)
    packed = warploom.quantize(linear.weight, "uint4", 64, scale_dtype=FP16)
    assert near(module(x), expected(module, x, weight=packed.dequantize(torch.float64)), 1e-5)
    assert module.activation == (linear.activation if source is Linear else None)
    handle.remove()
    module(x)
    assert len(ran) == 1
    assert isinstance(linear.weight, torch.nn.Parameter)
    assert QuantizedLinear.from_linear(torch.nn.Linear(K, N, bias=False)).bias is None


def pruned() -> torch.nn.Linear:
    linear = torch.nn.Linear(K, N)
    prune.l1_unstructured(linear, "weight", amount=0.5)
    return linear


WIDE = torch.nn.Linear(K, N)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: QuantizedLinear.from_linear(torch.nn.Linear(24, N)), "group 128: must divide k"),
        (lambda: QuantizedLinear.from_linear(torch.nn.Conv1d(4, 4, 1)), "a Conv1d"),
        (lambda: QuantizedLinear.from_linear(torch.nn.Linear(K, N, device="meta")), "on meta"),
        (lambda: QuantizedLinear.from_linear(Linear(K, N, recipe="rowwise")), "recipe='rowwise'"),
        (lambda: QuantizedLinear.from_linear(pruned()), "weight is computed"),
        (lambda: QuantizedLinear.from_packed(WIDE.weight), "must be a PackedWeight: .*quantize"),
        (lambda: QuantizedLinear.from_packed(sample(activations="int8").packed), "for int8 act"),
        (lambda: QuantizedLinear.from_packed(sample().packed, random(8)), r"bias .*\[8\].*\[136\]"),
        (lambda: layer(activation="swish"), r"activation 'swish'.*relu, gelu"),
        (lambda: QuantizedLinear(K, N, format="int3"), "weight format 'int3'"),
    ],
)
def test_what_makes_no_layer_is_refused(make: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(ProblemError, match=said):
        make()


def test_a_layer_of_a_checkpoint_that_others_quantized() -> None:
    """The way of the guide: its tensors, what they mean, and a layer of that."""
    (case,) = [one for one in load(FIXTURES / "awq.safetensors") if one.label == "g128"]
    weight = import_weight(case.tensors, case.config, name=NAME)
    module = QuantizedLinear.from_packed(weight)
    x = random(3, weight.shape[1], dtype=FP16)
    assert torch.equal(module(x), F.linear(x, case.weight))


def test_copies_compute_the_same() -> None:
    module, x = layer(sample("uint4", None)), random(5, K)
    other = copy.deepcopy(torch.nn.ModuleList([module]))[0]
    assert torch.equal(other(x), module(x))
    pairs = list(zip(other.parameters(), module.parameters(), strict=True))
    assert len(pairs) == 4
    assert all(one.data_ptr() != two.data_ptr() and type(one) is type(two) for one, two in pairs)


def test_a_layer_is_shown_with_what_its_weight_is() -> None:
    assert repr(layer(activation="silu")) == (
        "QuantizedLinear(in_features=256, out_features=136, bias=True, format='int4', group=128, "
        "bits=5.824, activation='silu', kernels=warploom)"
    )

"""Quantized layers among torch's modules, tracers and trainers, which expect torch.nn.Linear."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixed_samples import BF16, FP16, FP32, K, N, random
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel

import warploom
from warploom.errors import ProblemError
from warploom.integrations import quantized_weight
from warploom.nn import QuantizedLinear

FORMATS = [
    ("int4", 128),
    ("uint4", None),
    ("int8", None),
    ("e4m3", 128),
    ("mxfp4", 32),
    ("nvfp4", 16),
]
WIDTH, HEADS = 128, 4


def layer(format: str = "uint4", group: int | None = None) -> QuantizedLinear:
    """One with a scale and a zero point for each row, if not told otherwise."""
    linear = torch.nn.Linear(K, N, dtype=BF16)
    with torch.no_grad():
        linear.weight.copy_(random(N, K, seed=2))
    return QuantizedLinear.from_linear(linear, format, group)


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """The model with torch.nn.Linear of the weights that its quantized layers have, in float64."""
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features)
            state = {"weight": module.weight.dequantize(FP32), "bias": module.bias}
            linear.load_state_dict(state)
            made.set_submodule(name, linear)
    return made.double()


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found.double() - exact).norm() < 2**-6 * exact.norm())


# ---- Modules of torch that read layer.weight -----------------------------------------------------


@pytest.mark.parametrize("skip", [[], ["layers.0"], ["linear1"], ["linear2"]])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_torchs_encoder_computes_with_quantized_layers(
    masked: bool, grad: bool, skip: list[str]
) -> None:
    """Its fast path for inference reads the weight's memory as a matrix: it must not be taken."""
    torch.manual_seed(0)
    one = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 256, batch_first=True, dtype=BF16)
    model = torch.nn.TransformerEncoder(one, 2, enable_nested_tensor=masked).eval()
    warploom.patch(model, weights={"format": "int4", "skip": skip})
    x, mask = random(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = masked
    with torch.set_grad_enabled(grad):
        found = model(x, src_key_padding_mask=mask if masked else None)
        exact = rounded(model)(x.double(), src_key_padding_mask=mask if masked else None)
    assert near(found[~mask], exact[~mask])


@pytest.mark.parametrize("grad", [True, False])
def test_torchs_attention_takes_a_quantized_projection(grad: bool) -> None:
    """It computes with out_proj.weight, and never calls out_proj."""
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=BF16).eval()
    linear = torch.nn.Linear(WIDTH, WIDTH, dtype=BF16)
    model.out_proj = QuantizedLinear.from_linear(linear)  # type: ignore[assignment]
    x = random(2, 5, WIDTH)
    with torch.set_grad_enabled(grad):
        found, exact = model(x, x, x)[0], rounded(model)(*[x.double()] * 3)[0]
    assert near(found, exact)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_functions_of_torch_take_the_weight(
    format: str, group: int | None, dtype: torch.dtype
) -> None:
    """A model that calls F.linear with a layer's weight, as tied heads do."""
    module = layer(format, group)
    x, weight = random(5, K, dtype=dtype), module.weight.dequantize(torch.float64)
    assert module.bias is not None
    found = F.linear(x, module.weight, module.bias.to(dtype))  # type: ignore[arg-type]
    assert found.dtype == dtype
    assert near(found, F.linear(x.double(), weight, module.bias.double()))
    found = torch.matmul(random(5, N, dtype=dtype), module.weight)  # type: ignore[arg-type]
    assert near(found, random(5, N, dtype=dtype).double() @ weight)


def test_transforms_of_torch_func_take_the_weight_where_a_kernel_dequantizes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No kernel takes part in a transform, and the function that calls it refuses them."""
    monkeypatch.setattr(quantized_weight, "unserved", lambda device: None)  # as a GPU would say
    weight, x = layer().weight, random(5, K)
    dense = weight.dequantize(BF16)

    def called(one: torch.Tensor) -> torch.Tensor:
        return F.linear(one, weight)  # type: ignore[arg-type]

    assert torch.equal(torch.vmap(called)(x), torch.vmap(lambda one: F.linear(one, dense))(x))
    found = torch.func.grad(lambda one: called(one).sum())(x)
    assert torch.equal(found, torch.func.grad(lambda one: F.linear(one, dense).sum())(x))
    value, tangent = torch.func.jvp(called, (x,), (x,))
    assert torch.equal(value, tangent) and torch.equal(value, called(x))


def test_a_weight_says_what_models_read_of_one() -> None:
    """T5, for one, converts its hidden states to wo.weight.dtype: that of scales would be wrong."""
    module = QuantizedLinear.from_linear(torch.nn.Linear(K, N, bias=False, dtype=FP16))
    weight = module.weight
    assert (weight.dtype, weight.shape, weight.device) == (FP16, (N, K), torch.device("cpu"))
    assert (weight.ndim, weight.dim(), weight.numel()) == (2, 2, N * K)
    assert (weight.size(), weight.size(0), weight.size(-1)) == (torch.Size((N, K)), N, K)
    assert not weight.requires_grad and weight.grad is None and not weight.is_cuda
    assert weight.data is weight.detach() is weight
    assert module.float().weight.dtype == FP32
    assert module.to(BF16).weight.dtype == BF16
    assert copy.deepcopy(module).weight.dtype == BF16
    assert module.to("meta").weight.device.type == "meta"
    packed = warploom.quantize(torch.randn(N, K), "mxfp4")  # whose scales are bytes
    assert QuantizedLinear.from_packed(packed).weight.dtype == BF16
    assert torch.utils._pytree.tree_map(lambda one: one, weight).dtype == FP16


def test_models_may_ask_for_its_type_where_they_are_compiled() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wo = layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.to(self.wo.weight.dtype).to(self.wo.weight.device)
            return self.wo(x) + F.linear(x, self.wo.weight)  # type: ignore[arg-type]

    model, x = Model(), random(3, K, dtype=FP32)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: torch.nn.init.normal_(layer.weight),
        lambda layer: torch.nn.init.kaiming_uniform_(layer.weight),
        lambda layer: torch.add(torch.ones(N, K), 1, out=layer.weight),
        lambda layer: setattr(layer.weight, "data", torch.ones(N, K)),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(N, K))),
        lambda layer: layer.weight.copy_(torch.ones(N, K)),
        lambda layer: layer.weight.data_ptr(),
        lambda layer: layer.weight.t(),
    ],
)
def test_what_would_change_a_weight_is_refused(
    change: Callable[[QuantizedLinear], object],
) -> None:
    """A change to a copy that is then dropped would be lost without a word."""
    module = layer()
    before = module.weight.dequantize(torch.float64)
    with pytest.raises(ProblemError, match=r"quantized layer|quantized weight|QuantizedLinear"):
        change(module)
    assert torch.equal(module.weight.dequantize(torch.float64), before)
    assert not hasattr(module.weight, "data_ptr") and not hasattr(module.weight, "anything")


# ---- Parameters ----------------------------------------------------------------------------------


def test_nothing_makes_a_weight_train() -> None:
    """Torch raises where integers are to require grad; scales would never be given a gradient."""
    module = layer().requires_grad_()
    assert [name for name, one in module.named_parameters() if one.requires_grad] == ["bias"]
    for parameter in module.parameters():
        parameter.requires_grad = True
    module = copy.deepcopy(module).half().to("meta").to_empty(device="cpu").requires_grad_()
    assert [name for name, one in module.named_parameters() if one.requires_grad] == ["bias"]
    assert list(module.buffers()) == []


def test_a_weight_is_shared_by_another_layer() -> None:
    """layer.weight is a PackedWeight to all of warploom's functions."""
    module, x = layer(), random(3, K)
    other = QuantizedLinear.from_packed(module.weight, module.bias)
    assert torch.equal(other(x), module(x))
    pairs = zip(other.parameters(), module.parameters(), strict=True)
    assert all(one.data_ptr() == two.data_ptr() for one, two in pairs)
    copied = QuantizedLinear.from_packed(module.weight.clone(), module.bias)
    assert torch.equal(copied(x), module(x))
    assert copied.weight.slabs.data_ptr() != module.weight.slabs.data_ptr()


@torch.no_grad()
def test_a_weight_that_gets_other_memory_is_read_there(products: list[torch.Tensor]) -> None:
    """Calls read a plain tensor of a parameter's memory, which must follow where that goes."""
    module, x = layer(), random(3, K)
    expected = module(x)
    zeros = torch.zeros_like(module.weight.slabs)
    changes: list[Callable[[torch.nn.Parameter, torch.Tensor], object]] = [
        lambda data, other: setattr(data, "data", other),
        lambda data, other: data.set_(other),  # type: ignore[arg-type]
        lambda data, other: data.copy_(other),
        lambda data, other: module.register_parameter(
            "data", torch.nn.Parameter(other, requires_grad=False)
        ),
        lambda data, other: module.load_state_dict({**module.state_dict(), "data": other}),
    ]
    kept = module.weight.slabs.clone()
    for change in changes:
        for other in (zeros, kept):
            change(module.get_parameter("data"), other.clone())
            assert torch.equal(module.weight.slabs, other)
            assert torch.equal(module.state_dict()["data"], other)
            assert torch.equal(module(x), expected) is (other is kept)


def test_optimizers_and_averages_leave_a_weight_as_it_is() -> None:
    module, x = layer(), random(3, K)
    before = module.weight.dequantize(torch.float64)
    averaged = AveragedModel(module)
    for _ in range(2):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
        module(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(module)
    for one in (module, averaged.module):
        assert isinstance(one, QuantizedLinear)
        assert torch.equal(one.weight.dequantize(torch.float64), before)


def test_a_layer_is_reset_to_zero() -> None:
    """What FSDP's users call after to_empty; torch.nn.Linear's would fill the weight with noise."""
    module = layer().to("meta").to_empty(device="cpu")
    module.reset_parameters()
    assert module(random(3, K)).count_nonzero() == 0


@pytest.mark.parametrize("kernel", [True, False])
def test_a_layer_takes_parameters_that_it_is_called_with(
    request: pytest.FixtureRequest, kernel: bool
) -> None:
    """By functional_call, and as DataParallel's replicas have them: as attributes."""
    if kernel:
        request.getfixturevalue("products")
    module, other, x = layer(), layer("uint4").requires_grad_(False), random(3, K)
    with torch.no_grad():
        assert module.bias is not None
        module.bias.zero_()
        expected = module(x)
        state = dict(module.named_parameters())
        assert torch.equal(torch.func.functional_call(other, state, (x,)), expected)
        replica = other._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for name, one in state.items():
            setattr(replica, name, one.detach())
        assert torch.equal(replica(x), expected)


# ---- Tracers and files ---------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize(
    "trace",
    [
        lambda module, x: torch.jit.trace(module, (x,)),
        lambda module, x: make_fx(module)(x),
        lambda module, x: torch.export.export(module, (x,)).module(),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_layer_is_traced(format: str, group: int | None, trace: Any) -> None:  # noqa: ANN401
    module, x = layer(format, group), random(3, K)
    assert torch.equal(trace(module, x)(random(3, K, seed=9)), module(random(3, K, seed=9)))


def test_a_layer_that_is_pickled_is_the_same() -> None:
    module, file = layer().half(), io.BytesIO()
    torch.save(torch.nn.Sequential(module), file)
    file.seek(0)
    (again,) = getattr(torch, "load")(file, weights_only=False)  # noqa: B009
    assert torch.equal(again(random(3, K)), module(random(3, K)))
    assert again.weight.dtype == FP16
    assert not any(one.requires_grad for one in again.requires_grad_().weight.tensors().values())


@pytest.mark.parametrize("train", [True, False])
def test_a_weight_that_is_frozen_or_trained_by_its_attribute_stays_frozen(train: bool) -> None:
    """Code that freezes or trains a layer by its weight ended with an AttributeError."""
    one = layer()
    one.weight.requires_grad = train
    assert one.weight.requires_grad_(train) is not None
    assert not one.weight.requires_grad
    assert not any(each.requires_grad for name, each in one.named_parameters() if name != "bias")


def test_parameters_themselves_load_where_only_weights_may(tmp_path: Path) -> None:
    """torch.load(weights_only=True), its default, refused the class of frozen parameters."""
    one = layer()
    state = one.state_dict(keep_vars=True)
    torch.save(state, tmp_path / "state")
    loaded = getattr(torch, "load")(tmp_path / "state", weights_only=True)  # noqa: B009
    again = layer()
    again.load_state_dict(loaded)
    x = random(3, K)
    assert torch.equal(again(x), one(x))

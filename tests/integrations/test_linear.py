"""`warploom.nn.Linear` computes what torch's layer does: by which kernel, or why by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_bounds import ACTIVATIONS
from linear_layers import IN, OUT, expected, layer
from torch._subclasses.fake_tensor import FakeTensorMode

import warploom
from warploom.errors import ProblemError
from warploom.integrations import linear_rules

# ---- What it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, IN), (2, 3, IN), (IN,), (1, IN), (2, 1, 3, IN)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_kernel_computes_all_of_it_in_one_call(
    kernels: list[dict[str, Any]], activation: str, shape: tuple[int, ...], bias: bool
) -> None:
    """A layer that lost its bias, its function or the residual would be another function."""
    module = layer(activation=activation, bias=bias)
    x, residual = torch.randn(shape).bfloat16(), torch.randn(*shape[:-1], OUT).bfloat16()
    with torch.no_grad():
        for beside in (None, residual):
            y = module(x, beside)
            exact = expected(module, x, beside, activation)
            assert (y.shape, y.dtype) == (exact.shape, torch.bfloat16)
            assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
    assert len(kernels) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_a_kernel_torch_computes_the_same_and_its_gradients(
    activation: str, dtype: torch.dtype
) -> None:
    module, plain = layer(dtype, activation=activation), torch.nn.Linear(IN, OUT, dtype=dtype)
    plain.load_state_dict(module.state_dict())
    x, residual = torch.randn(5, IN, dtype=dtype), torch.randn(5, OUT, dtype=dtype)
    results = []
    for call in (module, lambda x, c: ACTIVATIONS[activation](plain(x)) + c):
        leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
        y = call(*leaves)
        y.square().sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for own, others in zip(module.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert torch.equal(own.grad, others.grad)


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
def test_the_type_of_a_sum_is_torchs(kernels: list[dict[str, Any]], kept: torch.dtype) -> None:
    """A residual stream of fp32 that passed a layer in bf16 lost half of its digits."""
    module, x = layer(activation="gelu"), torch.randn(5, IN).bfloat16()
    residual = torch.randn(5, OUT).to(kept)
    with torch.no_grad():
        y = module(x, residual)
        assert y.dtype == (module._by_torch(x, residual)).dtype
    exact = expected(module, x, residual, "gelu")
    assert (
        (y.double() - exact).abs() <= max(torch.finfo(y.dtype).eps, 1e-5) * (exact.abs() + 1)
    ).all()
    assert len(kernels) == 1


def test_a_residual_of_another_shape_is_refused(kernels: list[dict[str, Any]]) -> None:
    """Torch would broadcast it, a kernel would not."""
    for x, residual in ((torch.randn(5, IN), torch.randn(OUT)), (torch.randn(IN), torch.randn(1))):
        with pytest.raises(ProblemError, match=r"residual \[.*shape of the result"):
            layer()(x.bfloat16(), residual.bfloat16())
    assert kernels == []


@pytest.mark.parametrize("kernel", [True, False])
def test_autocast_converts_as_it_does_for_torchs_layer(
    request: pytest.FixtureRequest, kernel: bool
) -> None:
    calls = request.getfixturevalue("kernels") if kernel else []
    module, x = layer(torch.float32, activation="silu"), torch.randn(5, IN)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, torch.zeros(5, OUT))
        assert (module(x).dtype, y.dtype) == (torch.bfloat16, torch.float32)
        assert ("float64" in warploom.explain(layer(torch.float64), x).reason) is kernel
    exact = expected(module, x, None, "silu")
    assert ((y.double() - exact).abs() <= 2**-6 * (exact.abs() + 1)).all()
    assert len(calls) == 2 * kernel


# ---- Which kernel --------------------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@torch.no_grad()
def test_explain_tells_the_kernel_of_a_gpu_that_is_named() -> None:
    module = layer(activation="gelu", device="meta")
    keywords = {"bias": module.bias, "activation": "gelu", "gpu": "NVIDIA H200"}
    for shape, given in (((64, IN), (64, IN)), ((IN,), (1, IN))):
        told = warploom.explain(module, meta(*shape), gpu="NVIDIA H200")
        assert told == warploom.explain(meta(*given), module.weight.t(), **keywords)
        assert "gelu" in told.kernel
    residual = meta(4, OUT, dtype=torch.float32)
    assert "residual" in warploom.explain(module, meta(4, IN), residual, gpu="H200").kernel


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (meta(4, IN), meta(OUT, IN), ""),
        (meta(4, IN, dtype=torch.float32), meta(OUT, IN), "x is torch.float32 and the weight"),
        (meta(4, IN), meta(OUT, IN, dtype=torch.float16), "the weight torch.float16"),
        (meta(4, IN, dtype=torch.int8), meta(OUT, IN, dtype=torch.int8), "torch.int8"),
        (meta(0, IN), meta(OUT, IN), "nothing to multiply"),
        (meta(4, IN), meta(0, IN), "nothing to multiply"),
        (meta(4, 0), meta(OUT, 0), "nothing to multiply"),
        (meta(2**16, 2**16), meta(OUT, 2**16), ""),
        (meta(2**31 - 1, 2), meta(OUT, 2), "more than kernels count to"),
        (torch.eye(IN).bfloat16().to_sparse(), meta(OUT, IN), "sparse"),
    ],
)
def test_what_no_kernel_takes_is_torchs_and_said(
    x: torch.Tensor, weight: torch.Tensor, said: str
) -> None:
    reason = linear_rules.refusal(x, weight, named=True)
    assert said in (reason or "")
    assert (reason is None) is not bool(said)


def test_calls_do_what_explain_says(kernels: list[dict[str, Any]]) -> None:
    """One that told of a kernel where torch's ran would hide what a model costs."""
    module = layer()
    bf16 = torch.randn(4, IN).bfloat16()
    calls: list[tuple[torch.Tensor, torch.Tensor | None]] = [
        (bf16, None),
        (bf16[:0], None),
        (bf16, torch.zeros(4, OUT, dtype=torch.float64)),
        (bf16, torch.zeros(4, OUT)),
        (bf16[0], None),
        (bf16.reshape(2, 2, IN), None),
    ]
    with torch.no_grad():
        for x, residual in calls:
            told = warploom.explain(module, x, residual)
            kernels.clear()
            module(x, residual)
            assert bool(kernels) is not told.torch, told
    assert warploom.explain(module, bf16[:0]).torch


def test_on_the_cpu_torch_computes_and_explain_says_so() -> None:
    told = warploom.explain(layer(), torch.randn(4, IN).bfloat16())
    assert str(told) == "runs     torch's own kernel\nbecause  its tensors are not on a GPU"


def test_what_transforms_calls_sees_torchs_operators(kernels: list[dict[str, Any]]) -> None:
    """Kernels are no operators to torch.func: gradients for each sample would be wrong or fail."""
    module, x = layer().requires_grad_(False), torch.randn(3, 4, IN).bfloat16()
    parameters = dict(module.named_parameters())

    def loss(given: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(module, given, (x,))
        return result.float().square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert each["weight"].shape == (3, OUT, IN)
    _, tangent = torch.func.jvp(module, (x,), (torch.ones_like(x),))
    assert tangent.shape == (3, 4, OUT)
    assert kernels == []


def test_fake_tensors_of_a_gpu_that_is_not_here_are_traced() -> None:
    """Guards against a question to a driver that there may not be."""
    plain = layer(device="meta").requires_grad_(False)
    with FakeTensorMode():
        for name, parameter in list(plain.named_parameters()):
            fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
            setattr(plain, name, torch.nn.Parameter(fake, requires_grad=False))
        y = plain(torch.empty(3, IN, dtype=torch.bfloat16, device="cuda"))
    assert (y.shape, y.dtype, y.device.type) == ((3, OUT), torch.bfloat16, "cuda")

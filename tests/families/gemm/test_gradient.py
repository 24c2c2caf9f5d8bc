"""Gradients of gemm: each within a bound of float64 autograd on the same operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm import reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 6, 24, 16

Items = list[tuple[Any, ...]]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def scales(*shape: int) -> torch.Tensor:
    return random(*shape, dtype=FP32, seed=3).abs() + 0.5


def leaves_of(a: torch.Tensor, b: torch.Tensor, items: Items) -> list[torch.Tensor]:
    return [a, b, *(item[1] for item in items if isinstance(item[1], torch.Tensor))]


def exact(
    a: torch.Tensor, b: torch.Tensor, items: Items, dd: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Float64 gradients of everything that items and operands read, of the same values."""
    a, b = leaf(a.detach().double()), leaf(b.detach().double())
    wide: Items = [
        (kind, leaf(x.detach().double()) if isinstance(x, torch.Tensor) else x, *rest)
        for kind, x, *rest in items
    ]
    d = reference.apply(torch.matmul(a, b), wide)
    return torch.autograd.grad(
        d, leaves_of(a, b, wide), dd.double(), allow_unused=True, materialize_grads=True
    )


def held(found: torch.Tensor, expected: torch.Tensor, terms: int, what: str) -> None:
    """Every element within some roundings of 16 bits, of a sum of so many terms.

    A lost row, column, batch or scale is off by a multiple of the root mean square.
    """
    assert found.shape == expected.shape, what
    unit = 2.0**-8 if found.dtype != FP16 else 2.0**-10
    spread = expected.square().mean().sqrt() if expected.numel() else 0.0
    bound = 3 * unit * (expected.abs() + spread * (1 + terms**0.5 / 8))
    worst = ((found.double() - expected).abs() / (bound + 1e-30)).max() if found.numel() else 0
    assert worst <= 1, f"{what}: {worst:.2f} of its bound"


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    items: Items,
    *,
    keywords: dict[str, Any] | None = None,
    dd_of: Callable[[torch.Tensor], torch.Tensor] = lambda d: random(*d.shape, seed=9).to(d.dtype),
) -> tuple[torch.Tensor, ...]:
    d = warploom.gemm(a, b, epilogue=items, **(keywords or {}))
    given = leaves_of(a, b, items)
    wanted = [one for one in given if one.requires_grad]
    dd = dd_of(d)
    found = torch.autograd.grad(d, wanted, dd)
    expected = exact(a, b, items, dd)
    kept = [one for one, leaf in zip(expected, given, strict=True) if leaf.requires_grad]
    for one, leaf_, other in zip(found, wanted, kept, strict=True):
        assert one.dtype == leaf_.dtype
        held(one, other, max(d.numel() // max(one.numel(), 1), N), str(list(one.shape)))
    return found


# ---- Values --------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "row, col": lambda: (random(M, K), random(N, K).t()),
    "row, row": lambda: (random(M, K), random(K, N)),
    "col, col": lambda: (random(K, M).t(), random(N, K).t()),
    "col, row": lambda: (random(K, M).t(), random(K, N)),
    "slices": lambda: (random(M, 40)[:, 8:24], random(40, K)[8:32].t()),
    "rows of one matrix": lambda: (random(2, 3, K), random(N, K).t()),
    "batches": lambda: (random(3, M, K), random(3, N, K).mT),
    "batches, turned a": lambda: (random(3, K, M).mT, random(3, K, N)),
    "broadcast a": lambda: (random(M, K), random(3, N, K).mT),
    "broadcast b": lambda: (random(2, 3, M, K), random(3, K, N)),
    "one b of three dimensions": lambda: (random(3, M, K), random(1, N, K).mT),
    "b has more dimensions": lambda: (random(M, K), random(1, K, N)),
    "both broadcast": lambda: (random(2, 1, M, K), random(3, K, N)),
    "expanded": lambda: (random(1, M, K).expand(3, M, K), random(K, N)),
    "no rows": lambda: (random(0, K), random(N, K).t()),
    "no k": lambda: (random(M, 0), random(N, 0).t()),
    "no batches": lambda: (random(0, M, K), random(K, N)),
    "one row": lambda: (random(1, K), random(N, K).t()),
}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_operands_wherever_they_lie(layout: str, dtype: torch.dtype) -> None:
    a, b = (leaf(operand.to(dtype)) for operand in LAYOUTS[layout]())
    check(a, b, [])
    check(a, b.detach(), [])
    check(a.detach(), b, [], keywords={"out_dtype": FP32})


EPILOGUES: dict[str, Callable[[], Items]] = {
    "bias": lambda: [("bias", leaf(random(N)))],
    "bias [1, N]": lambda: [("bias", leaf(random(1, N, dtype=FP32)))],
    "scales": lambda: [
        ("scale_a", 0.5),
        ("scale_b", scales(1)),
        ("bias", leaf(random(N, dtype=FP32))),
        ("residual", leaf(random(M, N)), 0.5),
        ("scale_d", scales(1)),
    ],
    "vectors": lambda: [
        ("scale_a", scales(M)),
        ("scale_b", scales(1, N)),
        ("bias", leaf(random(N))),
    ],
    "vectors behind the bias": lambda: [
        ("bias", leaf(random(N))),
        ("scale_row", scales(M)),
        ("scale_column", scales(N)),
    ],
    "many scales": lambda: [("scale", scales(1)) for _ in range(5)] + [("scale", 0.5)],
    "residual": lambda: [("residual", leaf(random(M, N)), 1.0)],
    "residual of no weight": lambda: [("residual", leaf(random(M, N)), 0.0)],
    "a layer": lambda: [
        ("scale_a", 2.0),
        ("bias", leaf(random(N))),
        ("activation", "gelu_tanh"),
        ("residual", leaf(random(M, N)), -0.5),
        ("scale_d", 0.25),
    ],
    "relu": lambda: [("activation", "relu")],
    "relu and scale": lambda: [("bias", leaf(random(N))), ("activation", "relu"), ("scale", -2.0)],
    "silu of vectors": lambda: [
        ("scale_a", scales(M)),
        ("scale_b", scales(N)),
        ("bias", leaf(random(N))),
        ("activation", "silu"),
    ],
    "gelu after a residual": lambda: [
        ("residual", leaf(random(M, N)), 0.5),
        ("bias", leaf(random(N))),
        ("activation", "gelu"),
    ],
    "two activations": lambda: [
        ("activation", "silu"),
        ("bias", leaf(random(N))),
        ("activation", "gelu"),
    ],
    "gradients of scales": lambda: [
        ("scale_a", leaf(scales(M))),
        ("scale_b", leaf(scales(N))),
        ("bias", leaf(random(N))),
        ("activation", "silu"),
        ("scale_d", leaf(scales(1))),
    ],
    "anything behind the activation": lambda: [
        ("activation", "silu"),
        ("bias", leaf(random(N))),
        ("scale_column", scales(N)),
    ],
}


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_gradients_pass_every_step(name: str, preactivation: str) -> None:
    keywords = {"preactivation": preactivation}
    for turn in (False, True):
        a, b = leaf(random(M, K)), leaf(random(N, K).t())
        if turn:
            a, b = leaf(random(K, M).t()), leaf(random(K, N))
        check(a, b, EPILOGUES[name](), keywords=keywords)
        check(a, b, EPILOGUES[name](), keywords={**keywords, "out_dtype": FP32})
    check(a.detach(), b.detach(), [("bias", leaf(random(N))), *EPILOGUES[name]()[:5]])


def test_gradients_of_items_with_batches_are_sums_over_what_broadcast() -> None:
    a, b = leaf(random(2, 3, M, K)), leaf(random(3, K, N))
    check(a, b, [("bias", leaf(random(2, 3, N))), ("residual", leaf(random(M, N)), 0.5)])
    check(a, b, [("scale_row", scales(2, 3, M)), ("bias", leaf(random(N)))])
    check(a, b, [("scale_a", scales(M)), ("residual", leaf(random(6 * M, N)), 1.0)])
    rows, one = leaf(random(2, 3, K)), leaf(random(N, K).t())
    check(rows, one, [("scale_a", scales(2, 3)), ("scale_b", scales(N))])
    check(rows, one, [("bias", leaf(random(2, N))), ("activation", "silu")])


@pytest.mark.parametrize(
    "dd_of",
    [
        lambda d: torch.ones(1, 1, dtype=d.dtype).expand(d.shape),
        lambda d: random(N, 1).to(d.dtype).expand(N, M).t(),
        lambda d: random(N, M).to(d.dtype).t(),
        lambda d: random(M, 2 * N).to(d.dtype)[:, ::2],
        lambda d: random(M, N + 3).to(d.dtype)[:, 1:-2],
    ],
    ids=["a sum", "expanded columns", "transposed", "every other column", "slice"],
)
@pytest.mark.parametrize("activation", [[], [("activation", "silu")]], ids=["none", "silu"])
def test_the_arriving_gradient_may_lie_anyhow(
    dd_of: Callable[[torch.Tensor], torch.Tensor], activation: Items
) -> None:
    """A plan of aligned rows would read garbage of others, and of an expanded one its memory."""
    items = [("bias", leaf(random(N))), *activation]
    check(leaf(random(M, K)), leaf(random(N, K).t()), items, dd_of=dd_of)


def test_gradients_lie_as_their_operands_do() -> None:
    """A gradient of a weight that lay across would be copied by every optimizer's step."""
    weight = leaf(random(N, K))
    for a in (leaf(random(M, K)), leaf(random(K, M).t())):
        d = warploom.gemm(a, weight.t())
        da, dw = torch.autograd.grad(d, (a, weight), torch.ones_like(d))
        assert dw.is_contiguous()
        assert da.stride() == a.stride()
    b = leaf(random(K, N))
    (db,) = torch.autograd.grad(warploom.gemm(a, b).sum(), b)
    assert db.stride() == b.stride()


# ---- What is kept, and what is computed ----------------------------------------------------------


def kept_by(call: Callable[[], torch.Tensor]) -> list[int]:
    found: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return [tensor.data_ptr() for tensor in found]


def test_only_what_the_wanted_gradients_need_is_kept() -> None:
    """With a frozen weight, as beside a low-rank adapter, the activations must not be kept."""
    a, b, c, bias = random(M, K), random(K, N), random(M, N), random(N)
    assert kept_by(lambda: warploom.gemm(leaf(a), b, bias=bias, residual=c)) == [b.data_ptr()]
    assert kept_by(lambda: warploom.gemm(a, leaf(b), bias=bias, residual=c)) == [a.data_ptr()]
    assert kept_by(lambda: warploom.gemm(a, b, bias=leaf(bias), residual=leaf(c))) == []


def test_a_graph_keeps_no_tensor_but_by_saving_it() -> None:
    d = warploom.gemm(leaf(random(M, K)), random(K, N), scale_a=scales(1), activation="silu")
    assert d.grad_fn is not None
    assert not [name for name, value in vars(d.grad_fn).items() if isinstance(value, torch.Tensor)]


def test_an_operand_that_was_changed_is_noticed() -> None:
    a, b = leaf(random(M, K)), random(K, N)
    d = warploom.gemm(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        d.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_checkpoints_compute_the_same_gradients(reentrant: bool, activation: str | None) -> None:
    a, weight, bias = leaf(random(M, K)), leaf(random(N, K)), leaf(random(N))

    def layer(a: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, weight.t(), bias=bias, activation=activation)

    expected = torch.autograd.grad(layer(a).sum(), (a, weight, bias))
    for one in (a, weight, bias):
        one.grad = None
    checkpoint(layer, a, use_reentrant=reentrant).sum().backward()
    assert all(
        torch.equal(one.grad, other)  # type: ignore[arg-type]
        for one, other in zip((a, weight, bias), expected, strict=True)
    )


def test_a_plan_is_differentiable_as_a_call_is() -> None:
    a, b = leaf(random(M, K)), leaf(random(N, K).t())
    plan = warploom.plan(a, b, scale_a=2.0)
    found = torch.autograd.grad(plan(a, b, scale_a=2.0).sum(), (a, b))
    expected = torch.autograd.grad(warploom.gemm(a, b, scale_a=2.0).sum(), (a, b))
    assert all(map(torch.equal, found, expected))


def test_autocast_passes_gradients_to_what_it_lowered() -> None:
    a, weight = leaf(random(M, K, dtype=FP32)), leaf(random(N, K, dtype=FP32))
    with torch.autocast("cpu", dtype=BF16):
        d = warploom.gemm(a, weight.t())
    da, dw = torch.autograd.grad(d, (a, weight), random(M, N))
    assert (da.dtype, dw.dtype) == (FP32, FP32)
    held(dw, random(M, N).double().t() @ a.detach().to(BF16).double(), M, "weight")


# ---- fp8 and int8 --------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient_dtype", [None, BF16, E5M2])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2)])
def test_gradients_of_fp8_operands(
    dtypes: tuple[torch.dtype, torch.dtype], gradient_dtype: torch.dtype | None
) -> None:
    """Autograd brings a gradient to the type of its tensor, unless its grad_dtype says other."""
    a, b = leaf(random(32, 64).to(dtypes[0])), leaf(random(48, 64).t().to(dtypes[1]))
    for one in (a, b):
        one.grad_dtype = None
    scale, bias = scales(1), leaf(random(48))
    keywords: dict[str, Any] = {"scale_a": scale, "bias": bias, "activation": "silu"}
    d = warploom.gemm(a, b, gradient_dtype=gradient_dtype, **keywords)
    dd = random(32, 48) * 1e-6
    d.backward(dd)
    expected = exact(a, b, [("scale", scale), ("bias", bias), ("activation", "silu")], dd)
    coarse = 8 if gradient_dtype == E5M2 else 1  # e5m2 has three bits, over a sum of many
    for one, other in zip((a, b, bias), (*expected[:2], expected[3]), strict=True):
        assert one.grad is not None
        assert one.grad.dtype == BF16
        difference = (one.grad.double() - other).square().mean().sqrt()
        assert difference <= 0.01 * coarse * other.square().mean().sqrt()


def test_a_gradient_of_zeros_in_e5m2_is_zero() -> None:
    """Its scale is that of its largest magnitude: 0 / 0 would be NaN."""
    a, b = leaf(random(M, 16).to(E4M3)), random(8, 16).t().to(E4M3)
    a.grad_dtype = None
    d = warploom.gemm(a, b, gradient_dtype=E5M2)
    d.backward(torch.zeros_like(d))
    assert a.grad is not None
    assert torch.equal(a.grad, torch.zeros_like(a.grad))


def test_what_stands_beside_int8_operands_has_gradients() -> None:
    a = torch.randint(-127, 128, (M, K), dtype=torch.int8)
    b = torch.randint(-127, 128, (N, K), dtype=torch.int8).t()
    items: Items = [("scale", leaf(scales(1) / 1000)), ("bias", leaf(random(N)))]
    d = warploom.gemm(a, b, epilogue=items)
    found = torch.autograd.grad(d, [items[0][1], items[1][1]], random(M, N))
    expected = exact(a, b, items, random(M, N))[2:]
    for one, other in zip(found, expected, strict=True):
        held(one, other, M * N, "int8")


# ---- accumulate_into -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["row, col", "row, row", "rows of one matrix", "batches"])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("preactivation", ["save", "recompute"])
def test_the_gradient_of_b_is_added_in_place(layout: str, across: bool, preactivation: str) -> None:
    a, b = (leaf(operand) for operand in LAYOUTS[layout]())
    into = torch.randn(b.mT.shape).mT if across else torch.randn(b.shape)
    before = into.clone()
    keywords: dict[str, Any] = {"activation": "silu", "scale_a": 0.5, "scale_b": scales(N)}
    d = warploom.gemm(a, b, accumulate_into=into, preactivation=preactivation, **keywords)
    dd = random(*d.shape, seed=5)
    for times in (1, 2):
        d.backward(dd, retain_graph=True)
        expected = exact(
            a, b, [("scale", 0.5), ("scale_b", scales(N)), ("activation", "silu")], dd
        )[1]
        assert b.grad is None
        held((into - before) / times, expected, M, f"after {times}")


def test_accumulating_over_broadcast_batches_sums_them() -> None:
    a, b = leaf(random(2, 3, M, K)), leaf(random(3, K, N))
    into = torch.zeros(b.shape)
    d = warploom.gemm(a, b, accumulate_into=into)
    d.backward(random(*d.shape, seed=5))
    held(into, exact(a, b, [], random(*d.shape, seed=5))[1], 2 * M, "b")


def test_accumulating_is_seen_by_autograd() -> None:
    """Whoever saved the sums for a backward pass of their own must be told that they changed."""
    a, b, into = leaf(random(M, K)), leaf(random(K, N)), torch.zeros(K, N)
    version = into._version
    warploom.gemm(a, b, accumulate_into=into).sum().backward()
    assert into._version > version


# ---- Errors --------------------------------------------------------------------------------------

INTO = torch.zeros(K, N)
PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"accumulate_into": INTO.bfloat16()}, "accumulate_into of torch.bfloat16.*fp32"),
    "no tensor": ({"accumulate_into": 1.0}, "accumulate_into of 1.0.*fp32"),
    "shape": ({"accumulate_into": INTO.t()}, r"accumulate_into \[24, 16\].*as b, \[16, 24\]"),
    "device": ({"accumulate_into": INTO.to("meta")}, "on meta.*as b"),
    "grad": ({"accumulate_into": leaf(INTO)}, "requires grad.*must not.*detach"),
    "expanded": ({"accumulate_into": INTO[:1].expand(K, N)}, "accumulate_into.*one place"),
    "preactivation": ({"preactivation": "keep"}, "'keep'.*save or recompute"),
    "gradient_dtype": ({"gradient_dtype": FP32}, "gradient_dtype torch.float32.*float8_e5m2"),
    "out": ({"out": torch.zeros(M, N).bfloat16()}, "out with a tensor that requires grad"),
    "amax": ({"amax": torch.zeros(1).requires_grad_()}, "amax.*requires grad.*output of its step"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_gradients_cannot_be_had_of_is_refused_by_the_forward_call(case: str) -> None:
    keywords, match = PROBLEMS[case]
    with pytest.raises(ProblemError, match=match):
        warploom.gemm(leaf(random(M, K)), leaf(random(K, N)), **keywords)


def test_accumulating_for_a_frozen_b_is_refused() -> None:
    a, b = leaf(random(M, K)), random(K, N)
    with pytest.raises(ProblemError, match="does not require grad"):
        warploom.gemm(a, b, accumulate_into=INTO)
    with torch.no_grad():  # as in evaluation, where nothing is differentiated
        warploom.gemm(a, b, accumulate_into=INTO)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_second_derivative_is_refused_when_it_is_asked_for(activation: str | None) -> None:
    a, b = leaf(random(M, K)), leaf(random(K, N))
    d = warploom.gemm(a, b, activation=activation)
    (da,) = torch.autograd.grad(d.sum(), a, create_graph=True)
    with pytest.raises(ProblemError, match="second derivative of warploom"):
        da.sum().backward()

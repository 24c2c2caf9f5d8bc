"""Calls like an earlier one are launched on addresses, and return what a call that is made does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.runtime import plan as plans
from warploom.runtime.families.gemm.gradient_rule import Preactivation
from warploom.runtime.plan import Plan

BF16 = torch.bfloat16
M, N, K = 8, 32, 64
Product = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Plan[Any, Any]]:
    """The plans that were launched on addresses, each on those of a call of the same plan."""
    plans.forget()
    noted: list[Plan[Any, Any]] = []
    run_at: Callable[..., None] = Plan.run_at

    def seen(self: Plan[Any, Any], arguments: Any, results: Any, call_of: Any, *given: Any) -> None:  # noqa: ANN401
        call = call_of(*given)
        assert call.signature() == self.key
        assert call.arguments(self.details, results) == arguments
        run_at(self, arguments, results, call_of, *given)
        noted.append(self)

    monkeypatch.setattr(Plan, "run_at", seen)
    return noted


@pytest.fixture(params=["gemm", "mixed_gemm"])
def product(request: pytest.FixtureRequest) -> Product:
    """A product of [.., 64] with one of two weights."""
    weights = [values(N, K), values(N, K)]
    if request.param == "gemm":
        return lambda a, which=0, **keywords: warploom.gemm(a, weights[which].t(), **keywords)
    packed = [warploom.quantize(one, "int4", group=32) for one in weights]
    return lambda a, which=0, **keywords: warploom.mixed_gemm(a, packed[which], **keywords)


def values(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def scale() -> torch.Tensor:
    return torch.rand(1) + 0.5


# Made anew for each call.
KEYWORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "out": lambda: {"out": values(M, N)},
    "bias": lambda: {"bias": values(N)},
    "bias and out": lambda: {"bias": values(N, dtype=torch.float32), "out": values(M, N)},
    "residual": lambda: {"residual": values(M, N), "beta": float(torch.rand(()))},
    "beta 0": lambda: {"residual": values(M, N), "beta": 0.0},
    "beta, an int": lambda: {"residual": values(M, N), "beta": 2},
    "activation": lambda: {"activation": "silu"},
    "number": lambda: {"scale_a": float(torch.rand(())), "scale_d": 0.5},
    "tensor": lambda: {"scale_a": scale(), "scale_d": scale()},
    "both": lambda: {"scale_a": scale(), "scale_d": float(torch.rand(()))},
    "rows": lambda: {"scale_a": torch.rand(M)},
    "amax": lambda: {"amax": torch.zeros(1)},
    "type": lambda: {"out_dtype": torch.float32},
}


def expected(product: Product, a: torch.Tensor, which: int, **keywords: Any) -> torch.Tensor:
    """What a call that is made returns."""
    plans.forget()
    return product(a, which, **{name: one_like(one) for name, one in keywords.items()})


def one_like(value: Any) -> Any:  # noqa: ANN401
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("what", KEYWORDS)
def test_results_are_those_of_a_call_that_is_made(
    what: str, product: Product, launches: list[Plan[Any, Any]]
) -> None:
    calls = [(values(M, K), turn % 2, KEYWORDS[what]()) for turn in range(5)]
    wanted = [expected(product, a, which, **keywords) for a, which, keywords in calls]
    plans.forget()
    launches.clear()
    for turn, (a, which, keywords) in enumerate(calls):
        d = product(a, which, **keywords)
        assert torch.equal(d, wanted[turn])
        assert d is keywords["out"] if "out" in keywords else d.data_ptr() != a.data_ptr()
        assert len(launches) == max(0, turn - 1)  # from the second call of a plan on


def test_kinds_of_calls_are_kept_beside_each_other(
    product: Product, launches: list[Plan[Any, Any]]
) -> None:
    """A number, a tensor and neither in the place of one argument; with `out`, and without."""
    for turn in range(4):
        for what in KEYWORDS:
            a, keywords = values(M, K), KEYWORDS[what]()
            launches.clear()
            d = product(a, **keywords)
            assert turn < 2 or len(launches) == 1, what
            again = {name: one for name, one in keywords.items() if name != "out"}
            listed = warploom.runtime.families._product.epilogue.items(
                **{name: one for name, one in again.items() if name != "out_dtype"}
            )
            made = product(a, epilogue=list(listed), out_dtype=keywords.get("out_dtype"))
            assert torch.equal(d, made), what


def test_shapes_and_strides_that_alternate_are_told_apart(
    product: Product, launches: list[Plan[Any, Any]]
) -> None:
    kinds = [values(M, K), values(5, K), values(2, 3, K), values(K, M).t()]
    kinds += [values(M, 2 * K)[:, :K], values(M + 1, K)[1:]]
    wanted = [product(a.contiguous()) for a in kinds]
    plans.forget()
    for turn in range(4):
        for index, a in enumerate(kinds):
            launches.clear()
            assert torch.equal(product(a), wanted[index])
            assert turn < 2 or len(launches) <= 1


def test_a_warm_call_refuses_what_a_new_one_does(product: Product) -> None:
    a, residual = values(M, K), values(M, N)
    for _ in range(4):
        product(a)
        product(a, residual=residual, beta=0.5)
        product(a, activation="silu")
    for keywords, told in [
        ({"residual": residual, "beta": float("nan")}, "beta"),
        ({"residual": residual, "beta": True}, "beta"),
        ({"beta": torch.ones(())}, "beta"),
        ({"activation": "swish"}, "swish"),
        ({"bias": 1.0}, "bias"),
        ({"out": residual[:4]}, "out"),
        ({"out_dtype": "bf16"}, "out_dtype"),
        ({"spec": torch.ones(1)}, "spec"),
    ]:
        with pytest.raises(ProblemError, match=told):
            product(a, **keywords)
    with pytest.raises(ProblemError, match="overlap"):
        square = values(N, K)
        product(square, out=square.view(-1)[: N * N].view(N, N))


def test_gradients_are_those_of_calls_without_gradients_before(product: Product) -> None:
    a, bias = values(M, K), values(N)
    for _ in range(4):
        product(a, bias=bias)
    a.requires_grad_()
    d = product(a, bias=bias)
    assert d.requires_grad
    with torch.no_grad():
        assert torch.equal(product(a, bias=bias), d)
    a.requires_grad_(False)
    bias.requires_grad_()
    assert product(a, bias=bias).requires_grad
    bias.requires_grad_(False)
    assert not product(a, bias=bias).requires_grad


READ = {
    "nothing": dict,
    "bias": lambda: {"bias": values(N)},
    "activation": lambda: {"activation": "silu", "bias": values(N)},
    "relu": lambda: {"activation": "relu"},
    "residual": lambda: {"residual": values(M, N), "beta": float(torch.rand(())), "scale_a": 0.5},
    "list": lambda: {"epilogue": [("bias", values(N)), ("activation", "gelu"), ("scale", 2.0)]},
}


def both_passes(
    product: Product, a: torch.Tensor, dd: torch.Tensor, keywords: dict[str, Any]
) -> list[torch.Tensor]:
    """D, and the gradients of all that is read."""
    given = {name: one_like(one) for name, one in keywords.items()}
    a = a.clone().requires_grad_()
    listed = [[*item] for item in given.get("epilogue", ())]
    read = [a, *given.values(), *[one for item in listed for one in item]]
    read = [one.requires_grad_() for one in read if isinstance(one, torch.Tensor)]
    if listed:
        given["epilogue"] = [tuple(item) for item in listed]
    d = product(a, **given)
    return [d.detach(), *torch.autograd.grad(d, read, dd)]


@pytest.mark.parametrize("what", READ)
def test_gradients_are_those_of_a_call_that_is_made(
    what: str, product: Product, launches: list[Plan[Any, Any]]
) -> None:
    calls = [(values(M, K), values(M, N), READ[what]()) for _ in range(4)]
    wanted = []
    for a, dd, keywords in calls:
        plans.forget()
        wanted.append(both_passes(product, a, dd, keywords))
    plans.forget()
    for turn, (a, dd, keywords) in enumerate(calls):
        launches.clear()
        results = both_passes(product, a, dd, keywords)
        for one, other in zip(results, wanted[turn], strict=True):
            assert torch.equal(one, other)
        assert turn < 2 or launches


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("plain", [True, False])
def test_options_of_gradients_are_those_of_each_call(
    preactivation: Preactivation, launches: list[Plan[Any, Any]], *, plain: bool
) -> None:
    keywords: dict[str, Any] = {} if plain else {"activation": "silu", "scale_a": 0.5}
    a, b, dd = values(M, K), values(K, N).requires_grad_(), values(M, N)
    wanted = warploom.gemm(a, b, **keywords)
    (of_b,) = torch.autograd.grad(wanted, b, dd)
    for turn in range(4):
        launches.clear()
        into = torch.ones(K, N)
        d = warploom.gemm(a, b, preactivation=preactivation, main_grad=into, **keywords)
        assert torch.equal(d, wanted)
        assert turn < 2 or launches
        d.backward(dd)
        assert b.grad is None
        torch.testing.assert_close(into - 1, of_b.float(), rtol=0.02, atol=0.02)


def test_plans_recognise_their_calls(launches: list[Plan[Any, Any]]) -> None:
    a, b, bias = values(M, K), values(K, N), values(N)
    planned = warploom.plan(a, b, bias=bias)
    wanted = planned(a, b, bias=bias)
    for turn in range(4):
        launches.clear()
        assert torch.equal(planned(a, b, bias=bias), wanted)
        assert launches == [planned] * (turn > 0)
    with pytest.raises(ProblemError, match="that the plan was made for"):
        planned(a, b)
    with pytest.raises(ProblemError, match="that the plan was made for"):
        planned(values(2 * M, K), b, bias=bias)
    with pytest.raises(TypeError, match="biass"):
        planned(a, b, bias=bias, biass=bias)  # type: ignore[call-arg]
    bias.requires_grad_()
    assert planned(a, b, bias=bias).requires_grad


def test_a_kernel_that_is_named_and_options_of_gradients_are_never_passed_over() -> None:
    a, b = values(M, K), values(K, N)
    for _ in range(4):
        warploom.gemm(a, b)
    with pytest.raises(ProblemError, match="preactivation"):
        warploom.gemm(a, b, preactivation="keep")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="use_fast_accum 1: must be True or False"):
        warploom.gemm(a, b, use_fast_accum=1)  # type: ignore[arg-type]
    assert warploom.gemm(a, b, rounding="stochastic").shape == (M, N)


def test_a_list_with_what_is_stored_before_the_activation_is_recognised(
    launches: list[Plan[Any, Any]],
) -> None:
    """`preactivation` is a kind of items, and a keyword that says something else."""
    a, b = values(M, K), values(K, N)
    expected = warploom.gemm(a, b)
    for turn in range(4):
        z = torch.full((M, N), torch.nan, dtype=BF16)
        launches.clear()
        warploom.gemm(a, b, epilogue=[("preactivation", z), ("activation", "silu")])
        assert torch.equal(z, expected)
        assert turn < 2 or len(launches) == 1


def test_a_list_whose_item_has_two_tensors_is_never_compared_by_value() -> None:
    dh, down = values(M, K), values(K, N)
    for _ in range(4):
        z, dz = values(M, 2 * N), torch.full((M, 2 * N), torch.nan, dtype=BF16)
        h = warploom.gemm(dh, down, epilogue=[("silu_gate_gradient", z, dz)])
        gate, up = z.float().chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(h.float(), wanted, rtol=0.02, atol=0.02)
        assert not dz.isnan().any()


def test_a_keyword_that_is_a_tensor_beside_a_list_is_refused_by_name() -> None:
    a = torch.randn(8, 64).bfloat16()
    listed = [("bias", torch.randn(8).bfloat16())]
    for _ in range(3):
        warploom.gemm(a, a.t(), epilogue=listed)
    with pytest.raises(warploom.ProblemError):
        warploom.gemm(a, a.t(), epilogue=listed, beta=torch.tensor([1.0, 2.0]))  # type: ignore[arg-type]

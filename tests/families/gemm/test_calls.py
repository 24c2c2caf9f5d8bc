"""On CPU tensors the same calls give the same results: types, shapes, orders, outputs, plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm import api, reference

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, listed: list[tuple[Any, ...]]
) -> None:
    flat = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    exact, bound = reference.gemm_bound(flat, b, listed, d.dtype)
    difference = (d.reshape(exact.shape).double() - exact).abs()
    assert (difference <= bound).all()


TYPES = [
    *((a, d) for a in (FP16, BF16, torch.float8_e4m3fn, torch.int8) for d in (FP16, BF16, FP32)),
    (torch.int8, INT32),
]


@pytest.mark.parametrize(("a_type", "d_type"), TYPES, ids=str)
def test_a_type_pair_is_rounded_once_from_an_exact_product(
    a_type: torch.dtype, d_type: torch.dtype
) -> None:
    a, b = random(13, 29, dtype=a_type), random(17, 29, dtype=a_type).t()
    scales: dict[str, Any] = {} if d_type == INT32 else {"scale_a": 2.0**-6}
    d = warploom.gemm(a, b, out_dtype=d_type, **scales)
    assert (d.shape, d.dtype) == ((13, 17), d_type)
    assert_close(d, a, b, [("scale", value) for value in scales.values()])


@pytest.mark.parametrize(
    ("a_type", "scale", "d_type"),
    [
        (FP16, None, FP16),
        (BF16, 0.5, BF16),
        (torch.float8_e4m3fn, None, BF16),
        (torch.int8, None, INT32),
        (torch.int8, 0.5, BF16),
    ],
)
def test_the_output_type_that_nobody_asked_for_is_the_documented_one(
    a_type: torch.dtype, scale: float | None, d_type: torch.dtype
) -> None:
    a, b = random(5, 16, dtype=a_type), random(16, 7, dtype=a_type)
    assert warploom.gemm(a, b, scale_a=scale).dtype == d_type
    out = torch.empty(5, 7, dtype=FP32)
    assert warploom.gemm(a, b, scale_a=scale if scale else 1.0, out=out).dtype == FP32


@pytest.mark.parametrize("lead", [(2, 3), (1, 1), (4,), (2, 1, 3), (0, 3), (3, 0)])
def test_leading_dimensions_are_rows(lead: tuple[int, ...]) -> None:
    a, b = random(*lead, 5, 16), random(16, 7)
    d = warploom.gemm(a, b, bias=random(7))
    assert d.shape == (*lead, 5, 7)
    assert_close(d, a, b, [("bias", random(7))])
    out = torch.full((*lead, 5, 7), torch.nan, dtype=BF16)
    assert warploom.gemm(a, b, bias=random(7), out=out) is out
    assert torch.equal(out, d)


def test_leading_dimensions_that_do_not_lie_in_a_row_are_rows_too() -> None:
    a, b = random(5, 2, 16).transpose(0, 1), random(16, 7)
    assert_close(warploom.gemm(a, b), a, b, [])
    expanded = random(1, 5, 16).expand(3, 5, 16)
    assert_close(warploom.gemm(expanded, b), expanded, b, [])


@pytest.mark.parametrize(("m", "n", "k"), [(0, 7, 16), (5, 0, 16), (5, 7, 0), (0, 0, 0), (1, 1, 1)])
def test_an_extent_of_0_gives_an_empty_result_or_the_epilogue_of_0(m: int, n: int, k: int) -> None:
    a, b, bias = random(m, k), random(k, n), random(n)
    d = warploom.gemm(a, b, bias=bias, activation="silu")
    assert d.shape == (m, n)
    assert_close(d, a, b, [("bias", bias), ("activation", "silu")])
    assert warploom.gemm(random(2, m, k), b, out=torch.empty(2, m, n, dtype=BF16)).shape == (
        2,
        m,
        n,
    )


A, B = random(11, 24), random(24, 13)
ROW, COLUMN = random(11, dtype=FP32), random(13, dtype=FP32)
BIAS, C = random(13, dtype=FP16), random(11, 13, dtype=FP32)


@pytest.mark.parametrize(
    ("keywords", "listed"),
    [
        ({"scale_a": 0.5, "scale_b": -3.0}, [("scale", 0.5), ("scale", -3.0)]),
        ({"scale_a": ROW, "scale_b": COLUMN}, [("scale_row", ROW), ("scale_column", COLUMN)]),
        ({"scale_a": ROW[:1], "scale_b": COLUMN[:1]}, [("scale", ROW[:1]), ("scale", COLUMN[:1])]),
        (
            {"residual": C, "beta": 0.25, "activation": "gelu", "bias": BIAS, "scale_b": 2.0},
            [("scale", 2.0), ("bias", BIAS), ("activation", "gelu"), ("residual", C, 0.25)],
        ),
    ],
    ids=["numbers", "vectors", "one element", "all"],
)
def test_keywords_mean_scale_bias_activation_residual_in_that_order(
    keywords: dict[str, Any], listed: list[tuple[Any, ...]]
) -> None:
    d = warploom.gemm(A, B, **keywords)
    assert_close(d, A, B, listed)
    assert torch.equal(d, warploom.gemm(A, B, epilogue=listed))


def test_any_other_order_means_what_it_says() -> None:
    steps = {
        "bias": ("bias", BIAS),
        "relu": ("activation", "relu"),
        "residual": ("residual", C, -1.0),
        "scale": ("scale_column", COLUMN),
    }
    results = []
    for order in (
        "bias relu residual",
        "residual relu bias",
        "relu scale",
        "scale relu",
        "relu relu",
    ):
        listed = [steps[name] for name in order.split()]
        results.append(warploom.gemm(A, B, epilogue=listed, out_dtype=FP32))
        assert_close(results[-1], A, B, listed)
    assert not torch.allclose(results[0], results[1], atol=0.1)
    assert not torch.allclose(results[2], results[3], atol=0.1)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
def test_an_activation_keeps_nan_and_is_the_function_of_that_name(name: str) -> None:
    a = A.clone()
    a[3, 5] = torch.nan
    d = warploom.gemm(a, B, activation=name)
    assert d[3].isnan().all()
    functional = torch.nn.functional
    x = (A.double() @ B.double()).float()
    expected = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
    }[name](x)
    rows = [i for i in range(11) if i != 3]
    assert torch.allclose(d[rows].float(), expected[rows], rtol=2**-7, atol=1e-5)


def test_beta_0_does_not_read_the_residual() -> None:
    nan = torch.full((11, 13), torch.nan)
    assert torch.equal(warploom.gemm(A, B, residual=nan, beta=0.0), warploom.gemm(A, B))
    assert warploom.gemm(A, B, residual=nan, beta=1.0).isnan().all()


def test_beta_1_without_a_residual_is_a_call_without_epilogue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A 1.0 that was written out took the way of calls with an epilogue, which is longer."""
    expected = warploom.gemm(A, B)
    monkeypatch.setattr(api, "epilogue_items", None)
    assert torch.equal(warploom.gemm(A, B, beta=float("1")), expected)


def test_out_may_be_the_residual_and_is_what_is_returned() -> None:
    out = random(11, 13)
    expected = warploom.gemm(A, B, residual=out.clone(), beta=0.5)
    assert warploom.gemm(A, B, residual=out, beta=0.5, out=out) is out
    assert torch.equal(out, expected)


def test_a_strided_out_is_filled_and_nothing_beside_it() -> None:
    room = torch.full((13, 32), -7.0, dtype=BF16)
    out = room[1:12, 5:18]
    warploom.gemm(A, B, out=out)
    assert_close(out, A, B, [])
    out.fill_(-7.0)
    assert (room == -7.0).all()


@pytest.mark.parametrize("pitch", [0, 1, 12])
def test_an_out_with_two_elements_in_one_place_is_refused(pitch: int) -> None:
    """At a pitch of 12 the last column of each row is the first of the next."""
    room = torch.empty(11 * 13, dtype=BF16)
    with pytest.raises(ProblemError, match="no two elements at one address"):
        warploom.gemm(A, B, out=room.as_strided((11, 13), (pitch, 1)))
    warploom.gemm(A, B, out=room.as_strided((11, 13), (13, 1)))


def test_operands_are_left_as_they_were() -> None:
    given = [A, B, ROW, COLUMN, BIAS, C]
    before = [tensor.clone() for tensor in given]
    warploom.gemm(A, B, scale_a=ROW, scale_b=COLUMN, bias=BIAS, residual=C)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))


def test_a_plan_runs_what_it_was_made_for_and_nothing_else() -> None:
    out = torch.empty(11, 13, dtype=BF16)
    plan = warploom.plan(A, B, out=out)
    assert plan(A, B, out) is out
    other = random(11, 24) * 2
    assert_close(plan(other, B, out), other, B, [])
    beside = torch.cat((A.new_empty(1), A.flatten()))[1:].view(A.shape)  # TMA cannot read it
    for a, b, d in (
        (A[:5], B, out),
        (beside, B, out),
        (A, B.t().contiguous().t(), out),
        (A.half(), B, out),
        (A, B, None),
    ):
        with pytest.raises(ProblemError, match="that the plan was made for"):
            plan(a, b, d)


def test_a_plan_takes_the_epilogue_it_was_made_with() -> None:
    plan = warploom.plan(A, B, epilogue=[("bias", BIAS), ("scale", 2.0)])
    items = [("bias", BIAS * 2), ("scale", -1.0)]
    assert_close(plan(A, B, epilogue=items), A, B, items)
    with pytest.raises(ProblemError, match="that the plan was made for"):
        plan(A, B, epilogue=[("bias", BIAS)])


def test_a_call_is_planned_once() -> None:
    a, b = random(19, 24), random(24, 23)
    before = warploom.counters.plans
    for value in (1.0, 2.0):
        warploom.gemm(a * value, b, scale_a=value)
    assert warploom.counters.plans == before + 1


def test_explain_says_which_kernel_and_what_is_copied() -> None:
    told = warploom.explain(random(5, 16), random(7, 16).t())
    assert told.kernel.startswith("gemm_sm90a_bf16_")
    assert told.kernel in str(told)
    assert told.copies == ()
    assert warploom.explain(random(5, 17), random(17, 8)).copies == ("a",)
    assert warploom.explain(random(5, 16), random(16, 7)).copies == ("b",)
    wrong_major = random(16, 16, dtype=torch.int8), random(16, 16, dtype=torch.int8)
    assert warploom.explain(*wrong_major).copies == ("b",)


def test_a_kernel_that_is_named_is_the_one_that_is_planned() -> None:
    a, b = random(5, 16), random(8, 16).t()
    name = warploom.explain(a, b).kernel
    assert warploom.plan(a, b, spec=name).choice.spec.name == name
    assert torch.equal(warploom.gemm(a, b, spec=name), warploom.gemm(a, b))


def test_counters_start_again_from_0() -> None:
    counters = type(warploom.counters)()
    counters.reset()
    for name in ("loads", "copies", "copies"):
        counters.add(name)
    told = counters.as_dict()
    assert (told["loads"], told["copies"], told["launches"]) == (1, 2, 0)
    counters.reset()
    assert set(counters.as_dict().values()) == {0}


def test_a_plan_takes_the_keywords_of_the_call_it_was_made_for() -> None:
    a, b = torch.randn(7, 16).bfloat16(), torch.randn(16, 24).bfloat16()
    bias = torch.randn(24)
    plan = warploom.plan(a, b, bias=bias, activation="relu")
    made = plan(a, b, bias=bias, activation="relu")
    assert torch.equal(made, warploom.gemm(a, b, bias=bias, activation="relu"))
    with pytest.raises(ProblemError, match="that the plan was made for"):
        plan(a, b, bias=bias)


def test_a_residual_may_have_the_shape_of_the_result() -> None:
    a, b = torch.randn(2, 3, 16).bfloat16(), torch.randn(16, 24).bfloat16()
    residual = torch.randn(2, 3, 24).bfloat16()
    made = warploom.gemm(a, b, residual=residual, beta=0.5)
    exact = a.float() @ b.float() + 0.5 * residual.float()
    assert torch.allclose(made.float(), exact, rtol=2**-7, atol=1e-5)

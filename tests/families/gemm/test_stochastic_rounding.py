"""Stochastic rounding of D: its mean, its bits, what a call refuses, and what is rendered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import (
    Activation,
    Bias,
    Gate,
    Quantize,
    Residual,
    Scale,
    StochasticRounding,
)
from warploom.generator.families.gemm import GemmOperation, GemmShape, complete
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime import rounding
from warploom.runtime.families.gemm import operators, reference
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.samples import GemmData

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (BF16, FP16, E4M3, E5M2)
STATE = torch.tensor([11, 2**40 + 7])


def of_sums(values: torch.Tensor, n: int, dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
    """A GEMM whose rows are n times one of fp32 values of 16 bits: two terms of bf16 each."""
    high = values.to(BF16)
    low = (values - high.float()).to(BF16)
    a, b = torch.stack((high, low), -1), torch.ones(2, n, dtype=BF16, device=values.device)
    given: Any = {"rounding": "stochastic", "rounding_state": state, "out_dtype": dtype}
    return warploom.gemm(torch.nn.functional.pad(a, (0, 14)), _padded(b), **given)


def _padded(b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(b, (0, 0, 0, 14))


def binades(dtype: torch.dtype) -> torch.Tensor:
    """8 values in each binade, of which the two lowest have subnormal numbers of the type."""
    first, last = {BF16: (-30, 30), FP16: (-18, 15), E4M3: (-8, 8), E5M2: (-17, 15)}[dtype]
    torch.manual_seed(0)
    exponents = torch.arange(first, last).repeat_interleave(8).double()
    fractions = 1 + torch.randint(1 << 15, exponents.shape).double() / (1 << 15)
    signs = torch.randint(2, exponents.shape).double() * 2 - 1
    return (signs * fractions * 2**exponents).float()


def assert_unbiased(d: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that each element is a neighbour, and the mean of each binade within 4 sigma."""
    step = torch.finfo(dtype).eps * 2.0 ** values.abs().log2().floor().clamp(
        min=torch.tensor(torch.finfo(dtype).tiny).log2().item()
    )
    below = (values / step).floor() * step
    share = ((values - below) / step).double()
    off = d.double() - values.double()[:, None]
    assert (d.double() >= below.double()[:, None]).all()
    assert (d.double() <= (below.double() + step.double())[:, None]).all()
    variance = (share * (1 - share) * step.double() ** 2 * d.shape[1]).view(-1, 8).sum(-1)
    assert (off.view(-1, 8, d.shape[1]).sum((1, 2)).abs() <= 4 * variance.sqrt()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_each_binade_is_the_value(dtype: torch.dtype) -> None:
    values = binades(dtype)
    assert_unbiased(of_sums(values, 2048, dtype, STATE), values, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_nan_and_what_the_type_has_are_fixed(dtype: torch.dtype) -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, -0.75, 2.0**-6])
    a = torch.zeros(8, 16, dtype=BF16)
    a[:, 0] = values.to(BF16)
    b = torch.zeros(16, 48, dtype=BF16)
    b[0] = 1
    nearest = warploom.gemm(a, b, out_dtype=dtype)
    for state in range(20):
        given = {"rounding": "stochastic", "rounding_state": torch.tensor([state, 1])}
        d = warploom.gemm(a, b, out_dtype=dtype, **given)  # type: ignore[arg-type]
        assert torch.equal(d.float().nan_to_num(nan=7.0), nearest.float().nan_to_num(nan=7.0))


def test_a_state_decides_bits_and_no_numbers_repeat() -> None:
    numbers = rounding.patch_numbers(STATE, 203, 171, BF16)
    assert numbers.shape == (203, 171) and torch.equal(
        numbers[:50, :60], rounding.patch_numbers(STATE, 50, 60, BF16)
    )
    other = rounding.patch_numbers(torch.tensor([12, 0]), 203, 171, BF16)
    of_cast = rounding.numbers(STATE, 203, 176, transposed=False)[:, :171]
    for one in (other, of_cast, numbers.roll(8, 0), numbers.roll(8, 1), numbers.roll(1, 1)):
        assert ((numbers == one).double().mean() < 2e-4).all()
    for dtype, bits in ((FP16, 13), (E4M3, 20), (E5M2, 21)):
        wide = rounding.patch_numbers(STATE, 400, 400, dtype).double() / (1 << bits)
        assert abs(wide.mean() - 0.5) < 0.004 and abs(wide.var() - 1 / 12) < 0.002


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_calls_are_within_their_bound(dtype: torch.dtype) -> None:
    steps = (Bias("bf16"), Gate("silu"), Residual("bf16"), StochasticRounding())
    name: Any = {BF16: "bf16", FP16: "fp16", E4M3: "e4m3", E5M2: "e5m2"}[dtype]
    operation = GemmOperation("bf16", "bf16", name, epilogue=steps)
    one = GemmData(operation, GemmShape(9, 272, 64), "cpu", 0).operands()
    d = warploom.gemm(one.a, one.b, epilogue=one.listed, out_dtype=dtype)
    exact, bound = reference.gemm_bound(one.a, one.b, one.listed, dtype)
    assert ((d.double() - exact).abs() <= bound).all()
    nearest, half = reference.gemm_bound(one.a, one.b, one.listed[:-1], dtype)
    assert torch.equal(exact, nearest) and (bound > half).all()


def test_keywords_and_lists_ask_for_the_same() -> None:
    a, b = torch.randn(5, 64).to(BF16), torch.randn(64, 40).to(BF16)
    bias = torch.randn(40).to(BF16)
    words: Any = {"rounding": "stochastic", "rounding_state": STATE}
    d = warploom.gemm(a, b, bias=bias, **words)
    listed: list[Any] = [("bias", bias), ("stochastic_rounding", STATE)]
    assert torch.equal(d, warploom.gemm(a, b, epilogue=listed))
    assert torch.equal(d, warploom.gemm(a, b, epilogue=listed[:1], **words))
    assert torch.equal(d, warploom.plan(a, b, bias=bias, **words)(a, b, bias=bias, **words))
    compiled = torch.compile(
        lambda a, s: warploom.gemm(a, b, bias=bias, rounding="stochastic", rounding_state=s),
        backend="aot_eager",
        fullgraph=True,
    )
    assert torch.equal(d, compiled(a, STATE))
    out = torch.empty_like(d)
    operators.call(GemmCall(a, b, listed, out, BF16, True, None))
    assert torch.equal(d, out)
    assert not torch.equal(
        warploom.gemm(a, b, rounding="stochastic"), warploom.gemm(a, b, rounding="stochastic")
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_pass_straight_through(*, compiled: bool) -> None:
    x = torch.randn(3, 7, 64).to(BF16)
    w, bias = torch.randn(32, 64).to(BF16), torch.randn(32).to(BF16)

    def gradients(**words: Any) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in (x, w, bias)]

        def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return warploom.gemm(x, w.t(), bias=bias, activation="silu", **words)

        if compiled:
            run = torch.compile(run, backend="aot_eager", fullgraph=True)
        run(*leaves).float().sum().backward()
        return [one.grad for one in leaves if one.grad is not None]

    random = gradients(rounding="stochastic", rounding_state=STATE)
    nearest = gradients()
    assert len(random) == 3
    for one, other in zip(random, nearest, strict=True):
        torch.testing.assert_close(one, other)


def test_what_cannot_be_rounded_at_random_is_refused() -> None:
    a, b = torch.zeros(4, 64).to(BF16), torch.zeros(64, 256).to(BF16)
    scales = torch.zeros(2, 4).t()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rounding": "up"}, "rounding 'up'.*must be one of nearest, stochastic"),
        ({"rounding_state": STATE}, "rounding_state with rounding nearest"),
        ({"rounding": "stochastic", "rounding_state": STATE.float()}, r"must be int64 \[2\]"),
        ({"rounding": "stochastic", "rounding_state": STATE.repeat(2)}, r"must be int64 \[2\]"),
        ({"rounding": "stochastic", "rounding_state": 3}, "must be a tensor"),
        ({"rounding": "stochastic", "out_dtype": torch.float32}, "d behind stochastic_rounding"),
        (
            {
                "epilogue": [("quantize", scales)],
                "out_dtype": E4M3,
                "rounding": "stochastic",
            },
            "quantize_exact and stochastic_rounding: must be one of them",
        ),
        (
            {"epilogue": [("stochastic_rounding", STATE), ("scale", 2.0)]},
            "stochastic_rounding before other steps: must be the last",
        ),
    )
    for words, message in cases:
        with pytest.raises(ProblemError, match=message):
            warploom.gemm(a, b, **words)
    with pytest.raises(ProblemError, match="batched with stochastic_rounding: must be false"):
        warploom.gemm(a.expand(2, 4, 64), b.expand(2, 64, 256), rounding="stochastic")
    with pytest.raises(ProblemError, match="rounding stochastic without rounding_state"):
        warploom.plan(a, b, rounding="stochastic")


def spec(*steps: Any, d: str = "bf16", **fields: Any) -> KernelSpec:
    kinds: Any = ("bf16", "bf16", d)
    operation = GemmOperation(*kinds, epilogue=steps)
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, {"stages": 4, **fields}))


def test_what_is_rendered_rounds_last_and_once() -> None:
    one = StochasticRounding()
    text = render(spec(Scale("row"), Activation("relu"), one, tile=(128, 128, 64)))
    assert text.index("epilogue.apply(") < text.index("epilogue.step_2.round(x, at, chunk);")
    assert text.count("step_2.round(") == 1 and "step_2.apply" not in text
    assert text.index("step_2.round(x") < text.index("store(p, x, at, chunk);")
    assert "__byte_perm" in text
    text = render(spec(one, d="e4m3", tile=(128, 128, 64), split_k=2))
    assert text.count("epilogue.step_0.round(x, at, chunk);") == 1 and "__byte_perm" not in text
    with pytest.raises(SpecificationError, match="stochastic_rounding 'fp32'"):
        spec(one, d="fp32", tile=(128, 128, 64), stages="auto")
    with pytest.raises(SpecificationError, match="must be one of them"):
        spec(Quantize("exact"), one, d="e4m3", tile=(128, 128, 64))


def test_a_sharded_call_is_computed_whole() -> None:
    """Parts would repeat each other's numbers, which are of places in a tensor."""
    from warploom.runtime.families.gemm import sharding  # which imports torch's

    a, b = torch.randn(4, 64).to(BF16), torch.randn(64, 256).to(BF16)
    rounded = (a, b, ["stochastic_rounding"], [STATE], [], BF16, "fast", None)
    assert len(list(sharding._splits(rounded, {}))) == 1
    assert len(list(sharding._splits((a, b, [], [], [], BF16, "fast", None), {}))) > 2

"""RMSNorm through two epilogues: what calls fill and return, refuse, and what is rendered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host import needs_compiler, run

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Gate, GateGradient, MeanSquare, Residual, RmsScale
from warploom.generator.families import family
from warploom.generator.families.gemm import (
    GemmOperation,
    GemmShape,
    complete,
)
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import operators, reference
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.samples import GemmData

BF16, FP16 = torch.bfloat16, torch.float16


def shares_for(rows: int, n: int, padded: int = 0) -> torch.Tensor:
    """What a call fills, full of what no right result is full of."""
    return torch.full((rows, -(-n // 16) + padded), torch.nan)[:, : -(-n // 16)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("n", "eps"), [(256, 1e-6), (200, 0.0), (24, 0.5)])
def test_two_gemms_compute_a_layer_with_its_norm(n: int, eps: float, dtype: torch.dtype) -> None:
    """The norm's factor is that of exact D, within 1e-5 of each sum that torch's matmul returns.

    The order in which torch adds up depends on the CPU: its sums are compared with float64 by how
    many additions they have. A factor by squares of D after its rounding, without eps, or of
    another row exceeds 1e-5.
    """
    torch.manual_seed(0)
    h, o = torch.randn(3, 7, 64).to(dtype), torch.randn(n, 64).to(dtype)
    x, up, norm = torch.randn(3, 7, n).to(dtype), torch.randn(96, n).to(dtype), torch.rand(n) + 0.5
    shares = shares_for(21, n, padded=3)
    d = warploom.gemm(h, o.t(), epilogue=[("residual", x, 1.0), ("mean_square", shares)])
    folded = (up.float() * norm).to(dtype)
    y = warploom.gemm(d, folded.t(), epilogue=[("rms_scale", shares, eps)], out_dtype=torch.float32)
    exact = x.double() + h.double() @ o.double().t()
    mean = exact.square().mean(-1).reshape(21)
    torch.testing.assert_close(shares.double().sum(-1), mean, rtol=1e-5, atol=0)
    factors = (mean + eps).rsqrt().reshape(3, 7, 1)
    sums = warploom.gemm(d, folded.t(), out_dtype=torch.float32).double()
    wrong = (sums - d.double() @ folded.double().t()).abs()
    assert (wrong <= 2.0**-24 * n * (d.double().abs() @ folded.double().abs().t())).all()
    torch.testing.assert_close(y.double(), sums * factors, rtol=1e-5, atol=0)
    rounded = F.rms_norm(d.double(), (n,), None, eps) / d.double()  # of squares after rounding D
    torch.testing.assert_close(rounded, factors.expand_as(rounded), rtol=2**-9, atol=0)


def test_infinities_and_nan_reach_the_whole_row() -> None:
    x = torch.ones(4, 64)
    x[1, 3], x[2, 40], x[3, 5] = torch.inf, torch.nan, 1e20
    zeros, shares = torch.zeros(4, 16).to(BF16), shares_for(4, 64)
    d = warploom.gemm(
        zeros,
        torch.zeros(16, 64).to(BF16),
        epilogue=[("residual", x, 1.0), ("mean_square", shares)],
    )
    w = torch.rand(64, 24).to(BF16) + 0.5
    y = warploom.gemm(d, w, epilogue=[("rms_scale", shares, 1e-6)])
    of_torch = F.rms_norm(x, (64,), None, 1e-6) @ w.float()
    torch.testing.assert_close(y[0].float(), of_torch[0], rtol=1e-2, atol=1e-2)
    assert y[1:3].isnan().all() and of_torch[1:3].isnan().all()
    assert (y[3] == 0).all() and (of_torch[3] == 0).all()  # squares beyond fp32's range


def test_shares_cross_the_operators() -> None:
    a, b = torch.randn(4, 64).to(BF16), torch.randn(64, 48).to(BF16)
    shares = shares_for(4, 48)

    def both(a: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        d = warploom.gemm(a, b, epilogue=[("mean_square", shares)])
        return warploom.gemm(d, b.t(), epilogue=[("rms_scale", shares, 1e-5)])

    expected = both(a, shares)
    filled = shares_for(4, 48)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a, filled), expected)
    assert torch.equal(filled, shares)
    out, filled = torch.empty(4, 48, dtype=BF16), shares_for(4, 48)
    operators.call(GemmCall(a, b, [("mean_square", filled)], out, BF16, True, None))
    assert torch.equal(filled, shares)


def test_random_calls_are_within_their_bound() -> None:
    for steps in ((Residual("bf16"), MeanSquare()), (RmsScale(), Gate("silu")), (RmsScale(),)):
        operation = GemmOperation("bf16", "bf16", "bf16", epilogue=steps)
        one = GemmData(operation, GemmShape(9, 272, 72), "cpu", 0).operands()
        d = warploom.gemm(one.a, one.b, epilogue=one.listed)
        exact, bound = reference.gemm_bound(one.a, one.b, one.listed, BF16)
        assert ((d.double() - exact).abs() <= bound).all()


def test_calls_without_rows_or_terms() -> None:
    shares = shares_for(0, 48)
    d = warploom.gemm(
        torch.empty(0, 64).to(BF16),
        torch.zeros(64, 48).to(BF16),
        epilogue=[("mean_square", shares)],
    )
    assert d.shape == (0, 48)
    shares = shares_for(2, 20)
    x = torch.full((2, 20), 3.0)
    warploom.gemm(
        torch.empty(2, 0).to(BF16),
        torch.empty(0, 20).to(BF16),
        epilogue=[("residual", x, 1.0), ("mean_square", shares)],
    )
    assert torch.allclose(shares.sum(-1), torch.tensor(9.0))
    assert torch.allclose(shares, torch.tensor([16 * 9 / 20, 4 * 9 / 20]))


def test_what_has_no_norm_is_refused() -> None:
    a, b = torch.zeros(4, 64).to(BF16), torch.zeros(64, 256).to(BF16)
    shares, of_a = shares_for(4, 256), torch.ones(4, 4)
    for listed, options, message in (
        ([("mean_square", shares), ("scale", 2.0)], {}, "before other steps: must be the last"),
        (
            [("mean_square", shares)],
            {"out_dtype": torch.float8_e4m3fn},
            "d behind mean_square 'e4m",
        ),
        ([("mean_square", torch.empty(4, 15))], {}, r"must be \[4, 16\], a share for each row"),
        ([("mean_square", torch.empty(16, 4).t())], {}, "next to each other"),
        ([("mean_square", torch.empty(1, 16).expand(4, 16))], {}, "mean_square"),
        ([("mean_square", shares.double())], {}, "must be fp32"),
        ([("mean_square", 2.0)], {}, "must be a tensor"),
        ([("gate", "silu"), ("mean_square", shares_for(4, 128))], {}, "must be without the gate"),
        ([("rms_scale", torch.ones(4, 16), 1e-6)], {}, r"must be \[4, 4\]"),
        ([("rms_scale", of_a, -1e-6)], {}, "eps -1e-06: must be a finite number, 0 or larger"),
        ([("rms_scale", of_a, float("nan"))], {}, "eps nan"),
        ([("rms_scale", of_a)], {}, r"a rms_scale is \(kind, tensor, eps\)"),
        ([("rms_scale", of_a, 0.0)] * 2, {}, "at most one, as A has one norm"),
    ):
        with pytest.raises(ProblemError, match=message):
            warploom.gemm(a, b, epilogue=listed, **options)
    for listed in ([("mean_square", shares)], [("rms_scale", of_a, 1e-6)]):
        with pytest.raises(ProblemError, match=f"{listed[0][0]} with a tensor that requires grad"):
            warploom.gemm(a.clone().requires_grad_(), b, epilogue=listed)
        with pytest.raises(ProblemError, match=f"batched with {listed[0][0]}"):
            batches = torch.zeros(2, 64, 256).to(BF16)
            rows = torch.zeros(2, 2, 64).to(BF16)
            warploom.gemm(rows, batches, epilogue=listed)
        with torch.no_grad():
            warploom.gemm(a.clone().requires_grad_(), b, epilogue=listed)


def test_shares_of_outputs_lie_apart() -> None:
    a, b, memory = torch.zeros(4, 64).to(BF16), torch.zeros(64, 64).to(BF16), torch.empty(4, 64)
    with pytest.raises(ProblemError, match="overlap"):
        warploom.gemm(a, b, epilogue=[("residual", memory, 1.0), ("mean_square", memory[:, :4])])


def spec(*steps: Any, d: str = "bf16", **fields: Any) -> KernelSpec:
    made: Any = ("bf16", "bf16", d)
    operation = GemmOperation(*made, epilogue=steps)
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, {"stages": 4, **fields}))


def test_rules_say_which_tiles_have_whole_groups() -> None:
    one = MeanSquare()
    with pytest.raises(SpecificationError, match="tile n with mean_square 24"):
        spec(one, tile=(64, 24, 64), store="direct", consumers=1)
    with pytest.raises(SpecificationError, match="tile n with mean_square 32"):
        spec(one, tile=(64, 32, 64), cluster_split_k=4, store="direct", consumers=1)
    swapped = spec(one, tile=(24, 64, 64), swap_ab=True, store="direct", consumers=1)
    assert "kEach = 1;" in render(swapped)


@pytest.mark.parametrize(
    "fields",
    [
        {"tile": (128, 128, 64)},
        {"tile": (64, 128, 64), "kernel_schedule": "pingpong"},
        {"tile": (16, 128, 64), "swap_ab": True},
        {"tile": (64, 128, 64), "consumers": 1, "split_k": 2},
        {"tile": (16, 128, 64), "swap_ab": True, "store": "direct", "stream_k": True},
    ],
)
def test_factors_are_there_before_what_loads_them(fields: dict[str, Any]) -> None:
    text = render(spec(RmsScale(), **fields))
    consumer = text[text.index("struct Mainloop") :]
    prepared = consumer.index("epilogue.step_0.prepare<")
    (loads, *_) = re.finditer(r"epilogue\.load(?:_block)?\(", consumer)
    assert prepared < loads.start()
    assert "step_0.apply(x, " in text
    squares = render(spec(Residual("bf16"), MeanSquare(), **fields))
    summed = squares.index("epilogue.step_1.add(x, at, chunk, p.m, p.n);")
    assert squares.index("step_0.apply") < summed < squares.index("store(p, x, at, chunk);", summed)
    assert "step_1.apply" not in squares


STUBS = """
#include <cmath>
#include <cstdint>
#include <pthread.h>
#define __device__
#define __forceinline__ inline
#define CUTE_UNROLL
#define CUTE_NO_UNROLL
struct Index { int x; };
thread_local Index threadIdx;
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline int min(int a, int b) { return a < b ? a : b; }
// Warps of a block, and all of it: each meets twice, before and after what others read.
struct Meeting {
  pthread_barrier_t barrier;
  Meeting(unsigned threads = 32) { pthread_barrier_init(&barrier, nullptr, threads); }
  void operator()() { pthread_barrier_wait(&barrier); }
};
static Meeting warps[8], block(%d);
static float values[256];
inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  values[threadIdx.x] = value;
  warps[threadIdx.x / 32]();
  const float other = values[threadIdx.x ^ lanes];
  warps[threadIdx.x / 32]();
  return other;
}
namespace cutlass::arch {
struct NamedBarrier {
  static void sync(int, int) { block(); }
};
}
"""
HARNESS = Path(__file__).with_name("row_means.cpp")


def struct(name: str, text: str) -> str:
    """The text of a struct of an emitted kernel."""
    (found,) = re.findall(rf"^struct {name} \{{.*?^\}};", text, re.M | re.S)
    return str(found)


@needs_compiler
@pytest.mark.parametrize(
    "fields",
    [
        {"tile": (64, 128, 64), "consumers": 1},
        {"tile": (128, 48, 64), "consumers": 1},
        {"tile": (24, 64, 64), "swap_ab": True, "consumers": 1, "store": "direct"},
        {"tile": (32, 128, 64), "swap_ab": True},
    ],
)
def test_shares_and_factors_are_of_their_rows(tmp_path: Path, fields: dict[str, Any]) -> None:
    """What emitted kernels compute, by threads of the host."""
    squares, scales = (render(spec(step, **fields)) for step in (MeanSquare(), RmsScale()))
    constants = re.findall(r"^constexpr int k.*", squares.split("using FullBarrier")[0], re.M)
    rows, columns = "kBlocks * kWgmmaM", "kColumns"
    if fields.get("swap_ab"):
        rows, columns = columns, rows
    threads = 128 * (2 if fields.get("swap_ab") and "consumers" not in fields else 1)
    (places,) = re.findall(
        r"^struct Coordinates .*? Coordinates coordinates\(.*?^}", squares, re.M | re.S
    )
    parts = (
        STUBS % threads,
        *constants,
        f"constexpr int kTileRows = {rows}, kTileColumns = {columns}, kThreads = {threads};",
        struct("TileCoord", squares),
        places,
        struct("MeanSquare", squares),
        struct("RmsScale", scales),
        f'#line 1 "{HARNESS}"',
        HARNESS.read_text(),
    )
    run("\n".join(parts), tmp_path, ("cmath", "functional", "thread"))


def test_a_call_like_one_that_ran_is_refused_gradients_too() -> None:
    a, listed = torch.randn(8, 256).to(BF16), [("rms_scale", torch.rand(8, 16), 1e-5)]
    for _ in range(3):
        warploom.gemm(a, a.t(), epilogue=listed)
    with pytest.raises(warploom.ProblemError, match="rms_scale with a tensor that requires grad"):
        warploom.gemm(a.clone().requires_grad_(), a.t(), epilogue=listed)


def test_squares_behind_the_gradient_of_a_gate_are_refused() -> None:
    steps = (GateGradient("silu", "bf16"), MeanSquare())
    operation = GemmOperation("bf16", "bf16", "bf16", epilogue=steps)
    (reason,) = family("gemm").operation_reasons(operation)
    assert "must be without one of them" in reason

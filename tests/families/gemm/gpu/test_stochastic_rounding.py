"""Stochastic rounding in epilogues: the bits of the reference, the mean, graphs, NaN."""

from __future__ import annotations

from typing import Any

import gemm_wider as wider
import pytest
import torch
from gemm_cases import SHAPES, short
from gemm_rounded import assert_rounded_as_the_reference

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (BF16, FP16, E4M3, E5M2)
EXACT = {name: shape for name, shape in SHAPES.items() if "more tiles" not in name}


@pytest.mark.parametrize("shape", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("kernel", wider.ROUNDED, ids=short)
def test_a_kernel_has_the_bits_of_the_reference(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    assert_rounded_as_the_reference(kernel, *shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_each_binade_is_the_value(dtype: torch.dtype) -> None:
    """Of 1,048,576 values a binade: a tenth of a thousandth of a step shows."""
    first, last = {BF16: (-30, 30), FP16: (-18, 15), E4M3: (-8, 8), E5M2: (-17, 15)}[dtype]
    torch.manual_seed(0)
    exponents = torch.arange(first, last).repeat_interleave(64).double()
    fractions = 1 + torch.randint(1 << 15, exponents.shape).double() / (1 << 15)
    values = (fractions * 2**exponents).float().cuda()
    high = values.to(BF16)
    a = torch.nn.functional.pad(torch.stack((high, (values - high.float()).to(BF16)), -1), (0, 14))
    b = torch.nn.functional.pad(torch.ones(2, 1 << 14, dtype=BF16), (0, 0, 0, 14)).cuda()
    state = torch.tensor([5, 6], device="cuda")
    d = warploom.gemm(a, b, out_dtype=dtype, rounding="stochastic", rounding_state=state)
    smallest = torch.tensor(torch.finfo(dtype).tiny).log2().item()
    step = (torch.finfo(dtype).eps * 2.0 ** exponents.clamp(min=smallest)).cuda()  # exact there
    wide = values.double()
    share = wide / step % 1
    below = wide - share * step
    off = d.double() - wide[:, None]
    assert ((d.double() == below[:, None]) | (d.double() == (below + step)[:, None])).all()
    variance = (share * (1 - share) * step**2 * d.shape[1]).view(-1, 64).sum(-1)
    assert (off.view(-1, 64, d.shape[1]).sum((1, 2)).abs() <= 4 * variance.sqrt()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_are_those_of_nearest(dtype: torch.dtype) -> None:
    a = torch.randn(130, 64, device="cuda").to(BF16)
    a[::3, 5], a[1::7, 6], a[5, 7] = torch.nan, torch.inf, -torch.inf
    b = torch.eye(64, 136, device="cuda").to(BF16)
    nearest = warploom.gemm(a, b, out_dtype=dtype).float()
    d = warploom.gemm(a, b, out_dtype=dtype, rounding="stochastic").float()
    assert torch.equal(d.isnan(), nearest.isnan()) and torch.equal(d.isinf(), nearest.isinf())
    large = nearest.abs() >= torch.finfo(dtype).max
    assert torch.equal(d[large], nearest[large])


def test_graphs_round_by_their_state_or_draw_one_at_each_replay() -> None:
    a = torch.randn(256, 512, device="cuda").to(BF16)
    b = torch.randn(512, 384, device="cuda").to(BF16)
    state = torch.tensor([1, 2], device="cuda")
    words: Any = {"rounding": "stochastic"}
    eager = warploom.gemm(a, b, rounding_state=state, **words)
    warploom.gemm(a, b, **words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fixed = warploom.gemm(a, b, rounding_state=state, **words)
        drawn = warploom.gemm(a, b, **words)
    graph.replay()
    first = drawn.clone()
    assert torch.equal(fixed, eager)
    graph.replay()
    assert torch.equal(fixed, eager) and not torch.equal(drawn, first)
    state += 1
    graph.replay()
    assert not torch.equal(fixed, eager)
    assert torch.equal(fixed, warploom.gemm(a, b, rounding_state=state, **words))


def test_the_table_and_the_model_choose_kernels_of_one_result() -> None:
    """Whatever is chosen by rows of A, an element has one number."""
    b = torch.randint(-3, 4, (512, 384), device="cuda").to(BF16)
    a = torch.randint(-3, 4, (700, 512), device="cuda").to(BF16)
    state = torch.tensor([3, 4], device="cuda")
    words: Any = {"rounding": "stochastic", "rounding_state": state, "scale_a": 0.3701171875}
    whole = warploom.gemm(a, b, **words)
    for m in (1, 5, 16, 33, 64, 129, 257):
        assert torch.equal(warploom.gemm(a[:m], b, **words), whole[:m])

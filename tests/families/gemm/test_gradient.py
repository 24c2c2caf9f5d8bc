"""Gradients of gemm: each within a bound of float64 autograd on the same operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gemm_gradients import (
    BF16,
    EPILOGUES,
    FP16,
    FP32,
    LAYOUTS,
    Items,
    K,
    M,
    N,
    check,
    leaf,
    random,
    scales,
)

import warploom


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_operands_wherever_they_lie(layout: str, dtype: torch.dtype) -> None:
    a, b = (leaf(operand.to(dtype)) for operand in LAYOUTS[layout]())
    check(a, b, [])
    check(a, b.detach(), [])
    check(a.detach(), b, [], keywords={"out_dtype": FP32})


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

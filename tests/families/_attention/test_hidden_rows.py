"""Rows that a large finite bias hides, and fully masked rows, get what torch's math path gives.

Guards against weights that do not sum to 1 where the log-sum-exp of a row is -1e9 or less (fp32
numbers there are 64 and more apart), and against NaN in the gradient of a fully masked row that
reaches the gradients of others.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import warploom

LEAST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
HIDING = [
    *((value, torch.float32) for value in (-1e4, -65504.0, -1e9, 1e9)),
    *((least, dtype) for dtype, least in LEAST.items()),
    (-1e9, torch.bfloat16),
]


def maths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Attention as torch's math path computes it, in fp32."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores + bias.float(), -1) @ v.float()


@pytest.mark.parametrize(("value", "dtype"), HIDING)
@pytest.mark.parametrize(("dim", "softcap"), [(64, None), (96, None), (256, None), (64, 20.0)])
def test_a_row_that_a_finite_bias_hides_has_torchs_mean_of_v_and_gradients(
    value: float, dtype: torch.dtype, dim: int, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(dim)
    q, k, v, dout = (torch.randn(2, 2, 33, dim, generator=generator).bfloat16() for _ in range(4))
    bias = torch.zeros(2, 1, 33, 33, dtype=dtype)
    bias[0, :, :5] = bias[0, :, 7, :20] = bias[1, :, :, 30:] = value
    found = []
    for compute in (
        lambda q, k, v: warploom.attention(q, k, v, bias=bias, softcap=softcap),
        lambda q, k, v: maths(q, k, v, bias, softcap),
    ):
        leaves = [one.clone().requires_grad_() for one in (q, k, v)]
        out = compute(*leaves)
        out.backward(dout.to(out.dtype))
        found.append([out.detach(), *(one.grad for one in leaves)])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), torchs.float(), atol=0.01, rtol=0.01)
    if abs(value) > 1e8:
        mean = v[0].float().mean(1, keepdim=True).expand(2, 5, dim)
        torch.testing.assert_close(found[0][0][0, :, :5].float(), mean, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    ("dout", "dlse", "sinks"),
    [
        *product((math.nan, math.inf, 1.0), (math.nan, -math.inf, None), (None,)),
        *product((math.nan, math.inf), (None,), (0.0, 1.5, -math.inf)),
    ],
)
def test_gradients_of_a_fully_masked_row_stay_out_of_all_others(
    dout: float, dlse: float | None, sinks: float | None
) -> None:
    q, k, v = (torch.randn(1, 2, 20, 64).bfloat16().requires_grad_() for _ in range(3))
    scores = None if sinks is None else torch.full((2,), sinks, requires_grad=True)
    leaves = (q, k, v) if scores is None else (q, k, v, scores)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    mask[:, :, 3] = False
    given = [torch.randn(1, 2, 20, 64).bfloat16(), torch.randn(1, 2, 20)]
    found = []
    for of_masked in ((0.0, 0.0), (dout, dlse)):
        arriving = [one.clone() for one in given]
        for one, number in zip(arriving, of_masked, strict=True):
            if number is not None:
                one[:, :, 3] = number
        results = warploom.attention(q, k, v, mask=mask, sinks=scores, return_lse=True)
        count = 1 if dlse is None else 2
        found.append(torch.autograd.grad(results[:count], leaves, arriving[:count]))
    assert all(map(torch.equal, *found))
    assert (found[0][0][:, :, 3] == 0).all()

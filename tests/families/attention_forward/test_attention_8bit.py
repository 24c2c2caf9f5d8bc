"""Attention of operands that are quantized first: results and gradients on the CPU."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom.errors import ProblemError

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(keys: int = 300, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """q, k and v, of which k has a mean that is far larger than its spread, and v one, too."""
    torch.manual_seed(keys + dim)
    q, k, v = (torch.randn(2, heads, keys, dim) for heads in (4, 2, 2))
    k, v = k + 5 * torch.randn(2, 1, dim), v + 1
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact(given: Operands, *, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp, in the precision of the operands."""
    q, k, v = given
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def apart(one: torch.Tensor, right: torch.Tensor) -> float:
    return float((one.double() - right).norm() / right.norm())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("scores", "bound"), [("int8", 0.06), ("e4m3", 0.09)])
def test_results_and_gradients_are_near_those_of_float64(
    scores: str, bound: float, causal: bool
) -> None:
    given = operands()
    wide = [one.double().requires_grad_() for one in given]
    right, right_lse = exact((wide[0], wide[1], wide[2]), causal=causal)
    q, k, v = (one.requires_grad_() for one in given)
    out, lse = warploom.attention_8bit(q, k, v, scores=scores, causal=causal, return_lse=True)
    assert out.dtype == q.dtype and not lse.requires_grad
    assert apart(out, right) < 0.02
    assert (lse - right_lse).abs().max() < 0.1
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    for one, wanted in zip(found, torch.autograd.grad(right, wide, dout.double()), strict=True):
        assert one.dtype == q.dtype and apart(one, wanted) < bound


def test_only_gradients_that_are_wanted_are_returned() -> None:
    q, k, v = operands()
    q.requires_grad_()
    warploom.attention_8bit(q, k, v).sum().backward()
    assert q.grad is not None and k.grad is None


def test_a_softcap_goes_without_smoothing() -> None:
    q, k, v = operands()
    found = warploom.attention_8bit(q, k, v, softcap=20.0)
    plain = warploom.attention(q, k, v, softcap=20.0)
    assert apart(found, plain.double()) < 0.05
    with pytest.raises(ProblemError, match="must be False: a softcap depends on whole scores"):
        warploom.attention_8bit(q, k, v, softcap=20.0, smooth=True)
    with pytest.raises(ProblemError, match=r"^k None of type NoneType: must be a torch tensor"):
        warploom.attention_8bit(q, None, v)  # type: ignore[call-overload]


def test_smoothing_is_what_makes_scores_of_keys_with_a_mean_exact() -> None:
    given = operands()
    right, _ = exact(tuple(one.double() for one in given))  # type: ignore[arg-type]
    smooth, plain = (
        apart(warploom.attention_8bit(*given, smooth=one), right) for one in (True, False)
    )
    assert smooth < plain


def test_operands_of_fp32_are_converted_under_autocast() -> None:
    q, k, v = (torch.randn(1, 1, 32, 64, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = warploom.attention_8bit(q, k, v)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and q.grad is not None and q.grad.dtype == torch.float32


def test_a_second_derivative_is_refused() -> None:
    """Gradients of a graph of gradients had none, and a penalty on them trained nothing."""
    q, k, v = operands()
    out = warploom.attention_8bit(q.requires_grad_(), k, v)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().square().sum().backward()

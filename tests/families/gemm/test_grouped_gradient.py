"""What gradients of a grouped GEMM refuse, and that asking for more changes none."""

from __future__ import annotations

import pytest
import torch
from grouped_operands import ENDS, offsets, operands
from torch.autograd import forward_ad

import warploom
from warploom.errors import ProblemError


def test_only_a_second_derivative_is_refused() -> None:
    """torch.autograd.grad(create_graph=True) itself asks for the first ones alone."""
    a, w = operands()
    a, w = a.nan_to_num().requires_grad_(), w.nan_to_num().requires_grad_()
    d = warploom.grouped_gemm(a, w.mT, offs=offsets(*ENDS))[: ENDS[-1]].float()
    plain = torch.autograd.grad(d.sum(), (a, w), retain_graph=True)
    found = torch.autograd.grad(d.sum(), (a, w), create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    with pytest.raises(ProblemError, match="second derivative"):
        found[0].float().sum().backward()


def test_transforms_of_torch_func_and_duals_are_named() -> None:
    a, w = operands()
    w.requires_grad_()

    def call(a: torch.Tensor) -> torch.Tensor:
        return warploom.grouped_gemm(a, w.mT, offs=offsets(*ENDS)).float().sum()

    with pytest.raises(ProblemError, match=r"torch\.func's grad"):
        torch.func.grad(call)(a)
    with forward_ad.dual_level(), pytest.raises(ProblemError, match="dual tensor"):
        call(forward_ad.make_dual(a, torch.ones_like(a)))

"""A modifier of attention is one class: references of both passes compute one of a test's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from warploom.runtime.families._attention import reference as forward
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers import MODIFIERS, Modifier
from warploom.runtime.families._attention.modifiers.modifier import Rows
from warploom.runtime.families.attention_backward import reference as backward


@dataclass(frozen=True, slots=True)
class Recency(Modifier):
    """A toy: later columns score more, every third column does not count, scores are bent."""

    rate: float
    argument: ClassVar[str] = "recency"

    def capped(self, s: torch.Tensor) -> torch.Tensor:
        return torch.asinh(s)

    def slope(self, s: torch.Tensor) -> torch.Tensor:
        return 1 / torch.cosh(s)

    def term(
        self, q: torch.Tensor, k: torch.Tensor, chunk: Rows, dtype: torch.dtype
    ) -> torch.Tensor:
        return self.rate * torch.arange(k.shape[2], dtype=dtype)

    def shown(self, q: torch.Tensor, k: torch.Tensor, chunk: Rows) -> torch.Tensor:
        return torch.arange(k.shape[2]) % 3 != 2

    def weighted(self, p: torch.Tensor, chunk: Rows) -> torch.Tensor:
        return p * 2

    def column(self, s: torch.Tensor) -> torch.Tensor:
        return s.new_full((*s.shape[:-1], 1), self.rate)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rate: float) -> torch.Tensor:
    """The same by torch's functions."""
    columns = torch.arange(k.shape[2])
    s = torch.asinh(q @ k.mT * 0.125) + rate * columns
    s = s.masked_fill(
        (columns % 3 == 2) | (columns > torch.arange(q.shape[2])[:, None]), -torch.inf
    )
    s = torch.cat([s, s.new_full((*s.shape[:-1], 1), rate)], -1)
    return 2 * torch.softmax(s, -1)[..., :-1] @ v


def test_references_of_both_passes_compute_a_modifier_of_ones_own() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, 3, 40, 16, generator=random, dtype=torch.float64) for _ in range(4)
    )
    function = Function(0.125, Band(right=0), (Recency(0.05),))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    wanted = plain(q, k, v, 0.05)
    gradients = torch.autograd.grad(wanted, (q, k, v), dout)
    with torch.no_grad():
        out, lse = forward.exact(q, k, v, function)
        tensors = backward.Tensors(q, k, v, out, lse, dout)
        torch.testing.assert_close(out, wanted)
        for got, right in zip(backward.exact(tensors, function), gradients, strict=True):
            torch.testing.assert_close(got, right)


@pytest.mark.parametrize("kind", MODIFIERS, ids=lambda kind: kind.__name__)
def test_every_modifier_is_named_by_an_argument_of_its_own(kind: type[Modifier]) -> None:
    assert [other.argument for other in MODIFIERS].count(kind.argument) == 1

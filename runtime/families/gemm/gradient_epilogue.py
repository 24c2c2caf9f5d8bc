"""From the gradient of D to that of A B and of what the epilogue's items read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch

from warploom.generator.epilogue import Activation, Bias, Residual, Scale
from warploom.generator.families.gemm import Accumulation
from warploom.generator.step import Reads
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.operand import Extents, natural
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.gemm.gradient_products import Scales, factor_type, product
from warploom.runtime.families.gemm.gradient_rule import A, B, Metadata, Place, Rule

Found = dict[Place, torch.Tensor]  # gradients of the items' tensors


@dataclass(slots=True)
class Passing:
    """A gradient on its way from D to the products: `of` [.., m, n] times `scales`.

    sums    of the columns of `of` over all rows, in fp32, where they are known
    """

    of: torch.Tensor
    scales: Scales = field(default_factory=Scales)
    sums: torch.Tensor | None = None

    def column_sums(self) -> torch.Tensor:
        """The sums; they are computed once."""
        if self.sums is None:
            self.sums = activation_backward(self.of, sums=True)[1]
        return cast("torch.Tensor", self.sums)


def passed(
    rule: Rule,
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[object],
    kept: torch.Tensor | None,
    g: torch.Tensor,
    accumulation: Accumulation,
) -> tuple[Passing, Found]:
    """What `g`, the gradient of D, is behind all items, and their tensors' gradients.

    `kept` is what the activation was given, or D in its place. Scales are left to who multiplies.
    """
    listed = rule.listed(tensors, numbers)
    x, found = Passing(g), Found()
    at = Extents(g.shape[:-2], g.shape[-2], g.shape[-1])
    for index in reversed(range(len(listed))):
        item, asked = listed[index], rule.items[index]
        kind = step_of(item).step
        if kind is Scale:
            _scale(x.scales, item, at)
        elif kind is Activation and rule.way != "linear":
            _activate(x, rule, tensors, listed[:index], item[1], kept, accumulation)
        elif kind is Bias and rule.needed[asked[1]]:
            found[asked[1]] = _of_bias(x, rule.metadata[asked[1]], at)
        elif kind is Residual and rule.needed[asked[1]]:
            found[asked[1]] = _of_residual(x, item[2], rule.metadata[asked[1]], at)
    return x, found


def _activate(
    x: Passing,
    rule: Rule,
    tensors: Sequence[torch.Tensor | None],
    before: Sequence[Item],
    function: str,
    kept: torch.Tensor | None,
    accumulation: Accumulation,
) -> None:
    """Take a gradient past the activation."""
    a, b = tensors[A], tensors[B]
    dtype = factor_type(rule.metadata[A].dtype)
    n = x.of.shape[-1]
    biases = [one[1] for one in rule.items[: len(before)] if one[0] == "bias"]
    # The gradient of a bias of all rows comes from the same pass.
    sums = any(rule.needed[place] and prod(rule.metadata[place].shape) == n for place in biases)
    if kept is None and a is not None and b is not None:
        steps: list[Item] = [*before, (f"{function}_gradient", x.of)]
        x.sums = x.of.new_empty(n, dtype=torch.float32) if sums else None
        if x.sums is not None:
            steps.append(("column_sum", x.sums))
        x.of = product(a, b, steps, dtype, accumulation)
        return
    dz, x.sums = activation_backward(x.of, kept, function, sums=sums, out_dtype=dtype)
    x.of = cast("torch.Tensor", dz)


def _of_bias(x: Passing, like: Metadata, at: Extents) -> torch.Tensor:
    if prod(like.shape) == at.n:
        return x.scales.of(x.column_sums()).to(like.dtype).reshape(like.shape)
    sums = _summed(x.of.sum(-2, dtype=torch.float32), "column", like, at)
    return x.scales.of(sums).to(like.dtype)


def composite(
    rule: Rule,
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    g: torch.Tensor,
    accumulation: Accumulation,
) -> tuple[torch.Tensor | None, Found]:
    """The gradient of A B in fp32, and the items': torch's own, of the steps on new products."""
    a, b = tensors[A], tensors[B]
    if a is None or b is None:
        raise AssertionError("the operands are kept for this")
    x = product(a, b, (), torch.float32, accumulation)
    wanted = [place for place, needed in enumerate(rule.needed) if needed and place > B]
    with torch.enable_grad():
        x = x.detach().requires_grad_(rule.needed[A] or rule.needed[B])
        leaves = {
            place: one.detach().requires_grad_()
            for place, one in enumerate(tensors)
            if place in wanted and one is not None
        }
        given = [leaves.get(place, one) for place, one in enumerate(tensors)]
        d = apply(x, rule.listed(given, numbers))
        asked = [x] * x.requires_grad + list(leaves.values())
        found = list(torch.autograd.grad(d, asked, g.to(d.dtype)))
    of_products = found.pop(0) if x.requires_grad else None
    return of_products, dict(zip(leaves, found, strict=True))


def _scale(scales: Scales, item: Item, at: Extents) -> None:
    """Multiply by one more scale."""
    value, reads = item[1], step_of(item).reads(item)
    if not isinstance(value, torch.Tensor):
        scales.number *= value
    elif reads == "row":
        scales.rows = _times(scales.rows, natural(reads, value, at))
    elif reads == "column":
        scales.columns = _times(scales.columns, natural(reads, value, at))
    else:
        scales.ones.append(value)


def _times(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None or other is None else one * other


def _of_residual(x: Passing, beta: float, like: Metadata, at: Extents) -> torch.Tensor:
    if not beta:
        return x.of.new_zeros(like.shape, dtype=like.dtype)
    plain = beta == 1 and x.scales.number == 1 and not x.scales.ones
    found = x.of if plain else x.scales.of(x.of.float() * beta)
    return _summed(found, "fragment", like, at).to(like.dtype)


def _summed(x: torch.Tensor, reads: Reads, like: Metadata, at: Extents) -> torch.Tensor:
    """Values [*batches, *own] summed over the batches that a tensor `like` this broadcasts to."""
    if x.numel() != prod(like.shape):
        seen = natural(reads, torch.empty(like.shape, device="meta"), at)
        x = x.float() if seen is None else x.float().sum_to_size(seen.shape)
    return x.reshape(like.shape)

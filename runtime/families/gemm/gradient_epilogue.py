"""From the gradient of D to that of A B and of what the epilogue's items read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warploom.generator.epilogue import Bias, Residual, Scale
from warploom.generator.families.gemm import Accumulation
from warploom.generator.step import Reads
from warploom.runtime.families.gemm import reference
from warploom.runtime.families.gemm.gradient_products import Scales, product
from warploom.runtime.families.gemm.gradient_rule import A, B, Lie, Place, Rule
from warploom.runtime.families.gemm.steps import step_of
from warploom.runtime.families.gemm.steps.operand import Extents, natural
from warploom.runtime.families.gemm.steps.step import Item

Found = dict[Place, torch.Tensor]  # gradients of the items' tensors


def linear(rule: Rule, listed: Sequence[Item], g: torch.Tensor) -> tuple[Scales, Found]:
    """What `g`, the gradient of D, is to be multiplied with, and the items' gradients."""
    scales, found = Scales(), Found()
    at = Extents(g.shape[:-2], g.shape[-2], g.shape[-1])
    for item, asked in zip(reversed(listed), reversed(rule.items), strict=True):
        kind = step_of(item).step
        if kind is Scale:
            _scale(scales, item, at)
        elif kind is Bias and rule.needed[asked[1]]:
            like = rule.lies[asked[1]]
            sums = _summed(g.sum(-2, dtype=torch.float32), "column", like, at)
            found[asked[1]] = scales.of(sums).to(like.dtype)
        elif kind is Residual and rule.needed[asked[1]]:
            found[asked[1]] = _of_residual(g, item[2], scales, rule.lies[asked[1]], at)
    return scales, found


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
        d = reference.apply(x, rule.listed(given, numbers))
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


def _of_residual(
    g: torch.Tensor, beta: float, scales: Scales, like: Lie, at: Extents
) -> torch.Tensor:
    if not beta:
        return g.new_zeros(like.shape, dtype=like.dtype)
    plain = beta == 1 and scales.number == 1 and not scales.ones
    found = g if plain else scales.of(g.float() * beta)
    return _summed(found, "fragment", like, at).to(like.dtype)


def _summed(x: torch.Tensor, reads: Reads, like: Lie, at: Extents) -> torch.Tensor:
    """Values [*batches, *own] summed over the batches that a tensor `like` this broadcasts to."""
    if x.numel() != torch.Size(like.shape).numel():
        seen = natural(reads, torch.empty(like.shape, device="meta"), at)
        x = x.float() if seen is None else x.float().sum_to_size(seen.shape)
    return x.reshape(like.shape)

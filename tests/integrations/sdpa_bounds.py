"""Attentions held against float64, element by element, as torch's function defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from warploom.generator.families._attention import UNBOUNDED
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._attention import reference as forward
from warploom.runtime.families._attention.function import Function, chunks
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers import Bias, Mask
from warploom.runtime.families._attention.modifiers.modifier import FLOAT_ROUNDOFF
from warploom.runtime.families.attention_backward import reference as backward

Tensors = tuple[torch.Tensor, ...]
Attention = Callable[..., torch.Tensor]
NAMES = ("out", "dq", "dk", "dv", "the gradient of attn_mask")


def draw(
    *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> torch.Tensor:
    """Normal random numbers [batch, heads, length, dim] that lie as [batch, length, heads, dim]."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    batch, heads, length, dim = shape
    drawn = torch.randn(batch, length, heads, dim, generator=generator).to(device, dtype)
    return drawn.transpose(1, 2)


def differentiated(
    attention: Attention, given: Tensors, **keywords: Any
) -> tuple[Tensors, Tensors]:
    """Run an attention of fresh leaves like those given: its result, and all gradients of it."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    out = attention(*leaves, **keywords)
    return (out.detach(),), torch.autograd.grad(out, leaves, dout_of(out))


def dout_of(out: torch.Tensor) -> torch.Tensor:
    """The gradient that arrives at a result: the same for results of one shape."""
    generator = torch.Generator().manual_seed(out.numel())
    return torch.randn(out.shape, generator=generator).to(out.device, out.dtype)


def assert_held(attention: Attention, given: Tensors, **keywords: Any) -> None:
    """Assert that results and gradients of an attention are within Warploom's bounds of float64.

    float64 is torch's own function on the same numbers; bounds are those of [batch, heads, length,
    dim] tensors. A fourth tensor is a mask whose gradient is held too; attn_mask has none.
    """
    (out,), found = differentiated(attention, given, **keywords)
    wide = tuple(tensor.detach().double() for tensor in given)
    exact = [tensor.requires_grad_() for tensor in wide]
    mask = keywords.get("attn_mask")
    added = mask is not None and mask.is_floating_point()
    told = {**keywords, "attn_mask": mask.double()} if added else keywords
    wanted = scaled_dot_product_attention(*exact, **told)
    gradients = torch.autograd.grad(wanted, exact, dout_of(out).double())
    bounds = _bounds(given, dout_of(out), keywords)
    for name, got, right, bound in zip(
        (*NAMES[: len(bounds)],), (out, *found), (wanted, *gradients), bounds, strict=True
    ):
        error = (got.double() - right.detach()).abs()
        assert got.isfinite().all(), name
        assert (error <= bound).all(), f"{name}: {(error / bound).max():.2f} of its bound"


def _bounds(given: Tensors, dout: torch.Tensor, keywords: dict[str, Any]) -> Tensors:
    q, k, v, *added = (tensor.detach() for tensor in given)
    right = 0 if keywords.get("is_causal") else UNBOUNDED
    masks = [*added, *(one for one in (keywords.get("attn_mask"),) if one is not None)]
    modifiers = (Mask(one) if one.dtype == torch.bool else Bias(one) for one in masks)
    scale = keywords.get("scale") or q.shape[-1] ** -0.5
    function = Function(scale, Band(right=right), tuple(modifiers))
    out, lse = forward.exact(q, k, v, function)
    errors = forward.bound(q, k, v, function)
    tensors = backward.Tensors(q, k, v, out, lse, dout, None)
    bounds = (errors[0], *backward.bound(tensors, function))
    return (*bounds, *(_of_added(tensors, function, errors, one) for one in added))


def _of_added(
    given: backward.Tensors,
    function: Function,
    errors: forward.Pair,
    added: torch.Tensor,
) -> torch.Tensor:
    """How far off the gradient of what is added to scores may be: a sum of theirs, of 16 bits.

    `errors` are those of out and lse.
    """
    (rows,) = chunks(given.q, given.k)  # few enough for one
    one = backward.chunk_of(given, function, rows, torch.float64)
    p_error = backward.probability_error(given, function, rows, one, errors[1])
    ds, error = backward.score_gradient_error(given, function, rows, one, p_error, errors[0])
    unit, smallest = unit_roundoff(given.q.dtype), torch.finfo(given.q.dtype).smallest_normal
    error += unit * (ds.abs() + error + smallest * (one.p > 0))
    error, size = (each.flatten(1, 2).sum_to_size(added.shape) for each in (error, ds.abs()))
    rounding = unit_roundoff(added.dtype) + FLOAT_ROUNDOFF * ds.numel()
    return error + rounding * (size + error)

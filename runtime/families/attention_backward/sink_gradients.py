"""The gradient of sinks in plain torch, on any device, and its bound.

lse has the share of a sink: dsinks = -sum(exp(sinks - lse) delta), by heads, of delta =
rowsum(dout out) - dlse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families.attention_backward.reference import (
    Tensors,
    masked_rows,
    sequence_of,
)
from warploom.runtime.families.attention_forward.scores import EXP2_ERROR, FLOAT_ROUNDOFF

if TYPE_CHECKING:
    from warploom.runtime.families.attention_backward.call import BackwardCall


def dsinks(given: Tensors, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sinks [heads] in their type, as out and lse are, summed in fp32."""
    return _dsinks(given, sinks, torch.float32).to(sinks.dtype)


def dsinks_following(given: Tensors, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sinks [heads] in float64, of out and lse as they are."""
    return _dsinks(given, sinks, torch.float64)


def dsinks_bound(given: Tensors, sinks: torch.Tensor) -> torch.Tensor:
    """Return how far a kernel's gradient of sinks may be from `dsinks_following`, in float64.

    Each row's share has the errors of its exponent and of rowsum(dout out); their sums are fp32.
    """
    weight, delta = _shares(given, sinks, torch.float64)
    mass = (_dout(given, sinks).double() * given.out.double()).abs().sum(-1)
    if given.dlse is not None:
        mass = mass + given.dlse.double().abs()
    largest = sinks.double().nan_to_num(neginf=0.0).abs()[:, None]
    exponent = largest + given.lse.double().abs().nan_to_num(posinf=0.0)
    off = weight * FLOAT_ROUNDOFF * (given.q.shape[-1] + 4) * mass
    off = off + torch.expm1(EXP2_ERROR + 4 * FLOAT_ROUNDOFF * exponent) * weight * delta.abs()
    rows = given.q.shape[0] * given.q.shape[2]
    off = off + FLOAT_ROUNDOFF * (64 + rows / 64) * weight * delta.abs()
    total = off.sum((0, 2))
    info, unit = torch.finfo(sinks.dtype), unit_roundoff(sinks.dtype)
    denormal = info.smallest_normal * info.eps / 2  # rounding below the normal numbers
    return total + unit * (dsinks_following(given, sinks).abs() + total) + denormal


def dsinks_of_call(
    call: BackwardCall,
    sinks: torch.Tensor,
    compute: Callable[[Tensors, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Apply `compute` to a call's tensors. Reads cu_seqlens, and so waits for a GPU."""
    offsets = call.forward.offsets
    q, k, v = call.forward.q, call.forward.k, call.forward.v
    given = Tensors(q, k, v, call.out, call.lse, call.dout, call.dlse)
    if offsets:  # every row of a sequence has its share, whichever it is of
        given = sequence_of(given, slice(0, int(offsets[0][-1])), slice(0, 0))
    return compute(given, sinks)


def _dsinks(given: Tensors, sinks: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    weight, delta = _shares(given, sinks, wide)
    return -(weight * delta).sum((0, 2))


def _shares(
    given: Tensors, sinks: torch.Tensor, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What of each row the sink has, and rowsum(dout out) - dlse: [batch, heads, seq_q]."""
    lse = given.lse.to(wide)
    weight = (sinks.to(wide)[:, None] - lse).exp().masked_fill(lse == -torch.inf, 0)
    dout = _dout(given, sinks).to(wide)
    delta = (dout * given.out.to(wide)).sum(-1)
    delta = delta if given.dlse is None else delta - given.dlse.to(wide)
    return weight, delta.masked_fill(lse == -torch.inf, 0)


def _dout(given: Tensors, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of out, without the NaN or Inf of fully masked rows."""
    _, bad = masked_rows(given.dout, given.out, given.lse, sinks)
    return given.dout.masked_fill(bad[..., None], 0)

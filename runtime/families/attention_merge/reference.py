"""The same function in plain torch, and how far off a kernel may be."""

from __future__ import annotations

import torch

from warploom.runtime.elements import unit_roundoff

Results = tuple[torch.Tensor, torch.Tensor]  # out, lse


def attention_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> Results:
    """Both results, in the precision of the operands, which are of one type."""
    lse_a, lse_b = (one.masked_fill(one == torch.inf, -torch.inf) for one in (lse_a, lse_b))
    base = torch.maximum(lse_a, lse_b).clamp_min(torch.finfo(lse_a.dtype).min)
    weight_a, weight_b = (lse_a - base).exp(), (lse_b - base).exp()
    total = weight_a + weight_b
    share = torch.where(total == 0, 0, 1 / total)
    out = _weighted(out_a, weight_a * share) + _weighted(out_b, weight_b * share)
    return out, torch.where(total == 0, -torch.inf, base + total.log())


def _weighted(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of no weight there are no keys, and `out` may be anything."""
    return torch.where(weight[..., None] == 0, 0, out * weight[..., None])


def bounds(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[Results, Results]:
    """Out and lse in float64, each with how far off a kernel's may be.

    Weights have the error of a difference of logarithms, which its exp makes small where it is
    large, of exp (2 units, CUDA's table) and of what they are divided by; sums round once more.
    """
    wide = [one.double() for one in (out_a, lse_a, out_b, lse_b)]
    out, lse = attention_merge(*wide)
    single, last = unit_roundoff(torch.float32), unit_roundoff(dtype)
    largest, _ = attention_merge(wide[0].abs(), wide[1], wide[2].abs(), wide[3])
    error = 16 * single * largest
    info = torch.finfo(dtype)
    stored = error + last * (out.abs() + error) + info.smallest_normal * info.eps
    return (out, stored), (lse, single * (2 * lse.abs().nan_to_num(posinf=0) + 8))

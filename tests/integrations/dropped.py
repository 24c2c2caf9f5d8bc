"""What attentions that drop weights have to give, by the mask that `warploom.dropout_mask` says."""

from __future__ import annotations

import torch

import warploom
from warploom.runtime.families._attention.dropout import drawn

Tensors = tuple[torch.Tensor, ...]


def state_of(seed: int, device: str) -> torch.Tensor:
    """The state that a first call draws after torch.manual_seed(seed), which this calls too."""
    torch.manual_seed(seed)
    state = drawn(torch.device(device))
    torch.manual_seed(seed)
    return state


def kept(state: torch.Tensor, p: float, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What weights of q [batch, heads, rows, dim] and k are multiplied by."""
    keep = round((1 - p) * 65536) / 65536
    return warploom.dropout_mask(state, p, *q.shape[:3], k.shape[2]) / keep


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factors: torch.Tensor,
    shown: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of [batch, heads, rows, dim] whose weights are multiplied, in their type."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
    if shown is not None:
        scores = scores.masked_fill(~shown, -torch.inf)
    weights: torch.Tensor = torch.softmax(scores, -1) * factors
    return weights @ v.repeat_interleave(groups, 1)


def close(found: Tensors, wanted: Tensors, part: float = 0.02) -> None:
    """Assert that tensors differ by so large a part at most, as norms."""
    for got, right in zip(found, wanted, strict=True):
        assert got.isfinite().all()
        assert (got.double() - right.double()).norm() <= part * right.double().norm()


def agree(out: torch.Tensor, dout: torch.Tensor, v: torch.Tensor, dv: torch.Tensor) -> None:
    """Assert that dv is of the weights that out is of: both sums are of dout, weights and v."""
    sums = [(one.double() * other.double()).sum() for one, other in ((out, dout), (v, dv))]
    size = out.double().norm() * dout.double().norm() / out.numel() ** 0.5
    assert abs(float(sums[0] - sums[1])) < 0.05 * float(size)

"""What attentions that drop weights have to give, by the mask that `warploom.dropout_mask` says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sdpa_bounds import differentiated

import warploom
from warploom.runtime.philox import drawn

Tensors = tuple[torch.Tensor, ...]
MASKS = ("padding", "mask", "bias", "learnt bias")  # beside dropout


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
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of [batch, heads, rows, dim] whose weights are multiplied, in their type."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if shown is not None:
        scores = scores.masked_fill(~shown, -torch.inf)
    weights: torch.Tensor = torch.softmax(scores, -1) * factors
    return weights @ v.repeat_interleave(groups, 1)


def mask_of(kind: str, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """One of MASKS, for q and k: of columns, or of all scores, of each head."""
    lead = (q.shape[0], 1, 1) if kind == "padding" else (1, q.shape[1], q.shape[2])
    generator = torch.Generator().manual_seed(k.shape[2])
    drawn = torch.randn(*lead, k.shape[2], generator=generator).to(q.device)
    return drawn.to(q.dtype) if "bias" in kind else drawn > -0.5


def verify_beside(
    kind: str, run: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Assert that `run`, warploom.sdpa, drops weights beside a mask, with the mask's gradient."""
    mask, p = mask_of(kind, q, k), 0.3
    learnt = (mask,) if kind == "learnt bias" else ()
    state = state_of(3, q.device.type)

    def ours(*given: torch.Tensor) -> torch.Tensor:
        q, k, v, *learnt = given
        return run(q, k, v, learnt[0] if learnt else mask, dropout_p=p, enable_gqa=True)

    def exact(*given: torch.Tensor) -> torch.Tensor:
        q, k, v, *learnt = given
        added = learnt[0] if learnt else None if mask.dtype == torch.bool else mask.double()
        shown = mask if mask.dtype == torch.bool else None
        return attention(q, k, v, factors, shown, added)

    (out,), found = differentiated(ours, (q, k, v, *learnt))
    factors = kept(state, p, q, k)
    wide = tuple(one.double() for one in (q, k, v, *learnt))
    (right,), wanted = differentiated(exact, wide)
    close((out, *found), (right, *wanted))


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

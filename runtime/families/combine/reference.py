"""The same functions in plain torch, and how far off a kernel may be."""

from __future__ import annotations

import torch

from warploom.runtime.elements import unit_roundoff


def combine(
    rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """The sum of the rows of each token, in their precision."""
    total = rows.new_zeros(inverse.shape[0], rows.shape[1])
    there = _there(inverse, rows)
    if weights is not None:  # NaN of a pair without a row does not count either
        weights = weights.masked_fill(~there, 0)
    for choice in range(inverse.shape[1]):
        one = _taken(rows, inverse[:, choice], there[:, choice])
        total = total + (one if weights is None else one * weights[:, choice, None])
    return total


def permute(
    hidden: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None, count: int
) -> torch.Tensor:
    """So many rows, zeros for those of no pair, in the precision of hidden."""
    copies = hidden[:, None].expand(*inverse.shape, hidden.shape[1])
    if weights is not None:
        copies = copies * weights[..., None]
    # Pairs that are skipped are written to a row behind the last.
    rows = hidden.new_zeros(count + 1, hidden.shape[1])
    there = (inverse >= 0) & (inverse < count)
    places = torch.where(there, inverse, count).reshape(-1).long()
    return rows.index_copy_(0, places, copies.reshape(-1, hidden.shape[1]))[:-1]


def weight_gradient(
    hidden: torch.Tensor, inverse: torch.Tensor, combined: torch.Tensor
) -> torch.Tensor:
    """The dot product of each pair's row with its token."""
    there = _there(inverse, combined)
    columns = [
        (_taken(combined, inverse[:, choice], there[:, choice]) * hidden).sum(-1)
        for choice in range(inverse.shape[1])
    ]
    found = torch.stack(columns, 1) if columns else hidden.new_zeros(inverse.shape)
    return found.masked_fill(~there, 0)


def _there(inverse: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (inverse >= 0) & (inverse < rows.shape[0])


def _taken(rows: torch.Tensor, places: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """These rows, zeros where there is none."""
    if not rows.shape[0]:
        return rows.new_zeros(len(places), rows.shape[1])
    taken = rows[torch.where(there, places, 0).long()]
    return taken.masked_fill(~there[:, None], 0)


def sum_bound(
    rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `combine` in float64, and how far off a kernel's may be.

    A sum of k terms rounds at most k times more than each term does.
    """
    wide = None if weights is None else weights.double()
    exact = combine(rows.double(), inverse, wide)
    largest = combine(rows.double().abs(), inverse, None if wide is None else wide.abs())
    error = (inverse.shape[1] + 1) * unit_roundoff(torch.float32) * largest
    return exact, _stored(exact, error, rows.dtype)


def row_bound(
    hidden: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `permute` in float64, zeros for rows of no pair, and how far off it may be."""
    wide = None if weights is None else weights.double()
    exact = permute(hidden.double(), inverse, wide, count)
    if weights is None:
        return exact, torch.zeros_like(exact)
    return exact, _stored(exact, unit_roundoff(torch.float32) * exact.abs(), hidden.dtype)


def dot_bound(
    hidden: torch.Tensor, inverse: torch.Tensor, combined: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of weights of this type in float64, and how far off a kernel's may be.

    A lane adds up one column of 32, and lanes are added in pairs.
    """
    exact = weight_gradient(hidden.double(), inverse, combined.double())
    largest = weight_gradient(hidden.double().abs(), inverse, combined.double().abs())
    roundings = hidden.shape[1] / 32 + 16
    return exact, _stored(exact, roundings * unit_roundoff(torch.float32) * largest, dtype)


def _stored(exact: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error of what is rounded to this type once."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    return error + unit_roundoff(dtype) * (exact.abs() + error) + smallest

"""Which experts tokens have, drawn on the CPU: floors count those that are drawn on any machine."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

Routed = Literal["even", "zipf"]
Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # offsets, order, inverse


@lru_cache(maxsize=8)
def ids(tokens: int, experts: int, k: int, seed: int) -> torch.Tensor:
    """Different experts of each token, int64 [tokens, k]: every choice is as likely."""
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=draws).topk(k).indices


def chosen(ids: torch.Tensor) -> list[int]:
    """The experts that some token has."""
    found: list[int] = torch.bincount(ids.reshape(-1)).nonzero().reshape(-1).tolist()
    return found


@lru_cache(maxsize=8)
def ends(rows: int, groups: int, routed: Routed, seed: int) -> torch.Tensor:
    """Where groups end, int32 [groups]: each row draws its group, evenly or by Zipf's law."""
    draws = torch.Generator().manual_seed(seed)
    weights = torch.ones(groups)
    if routed == "zipf":
        weights /= torch.randperm(groups, generator=draws) + 1
    chosen = torch.multinomial(weights, rows, replacement=True, generator=draws)
    return torch.bincount(chosen, minlength=groups).cumsum(0).to(torch.int32)


def padded(ends: torch.Tensor, rows: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each of the rows of groups is if every group begins at a multiple of some number, and
    how many rows each group takes up there, int64 [rows] and [groups].
    """
    ends = ends.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    sizes = (counts + multiple - 1) // multiple * multiple
    row = torch.arange(rows, device=ends.device)
    group = torch.searchsorted(ends, row, right=True)
    return ((sizes.cumsum(0) - sizes) - (ends - counts))[group] + row, sizes


def sorted_by_expert(ids: torch.Tensor, experts: int) -> Sorted:
    """The offsets of experts, the order of pairs, and the row of each, as transformers has them."""
    expert, order = torch.sort(ids.reshape(-1), stable=True)
    counts = torch.histc(expert.float(), experts, 0, experts - 1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return counts.cumsum(0, dtype=torch.int32), order, inverse

"""The same function in plain torch."""

from __future__ import annotations

import torch

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # offsets, order, inverse


def route(ids: torch.Tensor, experts: int, first_expert: int) -> Results:
    """Ends of the experts' rows, the pair of each row, and the row of each pair; none waits."""
    local = ids.reshape(-1).long() - first_expert
    local = torch.where((local >= 0) & (local < experts), local, experts)
    placed, order = local.sort(stable=True)
    here = torch.arange(experts, device=ids.device)
    offsets = torch.searchsorted(placed, here, right=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=ids.device)
    inverse = inverse.masked_fill(local == experts, -1)
    return offsets.int(), order.int(), inverse.int().reshape(ids.shape)

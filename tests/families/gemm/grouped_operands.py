"""Operands of grouped GEMMs that tests share."""

from __future__ import annotations

import torch

BF16 = torch.bfloat16
ROWS, N, K = 37, 32, 48
ENDS = (5, 5, 20, 33)  # the second group is empty, and four rows have none


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def operands(kind: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and a weight [G, N, K] for each group; what no product reads is NaN."""
    torch.manual_seed(0)
    a, w = torch.randn(ROWS, K), torch.randn(len(ENDS), N, K)
    if kind == torch.int8:
        return (a * 30).to(kind), (w * 30).to(kind)
    a[ENDS[-1] :], w[1] = torch.nan, torch.nan
    return a.to(kind), w.to(kind)

"""Functions of torch.nn.functional that run on Warploom's kernels."""

from __future__ import annotations

from warploom.integrations.scaled_mm import scaled_mm

__all__ = ["scaled_mm"]

"""Modules of torch that run on Warploom's kernels."""

from __future__ import annotations

from warploom.integrations.linear import Linear

__all__ = ["Linear"]

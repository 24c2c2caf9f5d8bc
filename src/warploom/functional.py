"""Functions on Warploom's kernels: one of torch.nn.functional, and linear layers around a norm."""

from __future__ import annotations

from warploom.integrations.rms_norm import fold_rms_norm, linear_add, rms_norm_linear
from warploom.integrations.scaled_mm import scaled_mm

__all__ = ["fold_rms_norm", "linear_add", "rms_norm_linear", "scaled_mm"]

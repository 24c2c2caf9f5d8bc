"""Functions on Warploom's kernels: one of torch.nn.functional, and linear layers."""

from __future__ import annotations

from warploom.integrations.block_dropout import block_dropout_linear
from warploom.integrations.rms_norm import fold_rms_norm, linear_add, rms_norm_linear
from warploom.integrations.scaled_mm import scaled_mm
from warploom.runtime.families.gemm.block_masks import csr_block_mask

__all__ = [
    "block_dropout_linear",
    "csr_block_mask",
    "fold_rms_norm",
    "linear_add",
    "rms_norm_linear",
    "scaled_mm",
]

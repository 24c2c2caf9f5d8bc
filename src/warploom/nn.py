"""Modules of torch that run on Warploom's kernels."""

from __future__ import annotations

from warploom.integrations.bit_linear import BitLinear
from warploom.integrations.float8_linear import Float8Linear
from warploom.integrations.gated_mlp import GatedMLP
from warploom.integrations.linear import Linear
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.integrations.sparse_linear import SparseLinear

__all__ = ["BitLinear", "Float8Linear", "GatedMLP", "Linear", "QuantizedLinear", "SparseLinear"]

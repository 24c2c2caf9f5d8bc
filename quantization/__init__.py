"""Weights in 2, 4 and 8 bits: quantising, packing as kernels read them, and the way back."""

from __future__ import annotations

from warploom.quantization.error import ErrorReport
from warploom.quantization.file import load, save
from warploom.quantization.metadata import Metadata
from warploom.quantization.packed_experts import PackedExperts
from warploom.quantization.packed_weight import PackedWeight
from warploom.quantization.quantize import quantize

__all__ = ["ErrorReport", "Metadata", "PackedExperts", "PackedWeight", "load", "quantize", "save"]

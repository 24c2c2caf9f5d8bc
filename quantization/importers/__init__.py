"""Weights of checkpoints that others quantized, as packed weights: the same, number for number."""

from __future__ import annotations

from warploom.quantization.importers.recognition import (
    SOURCES,
    import_block_scaled,
    import_gate_up,
    import_weight,
)
from warploom.quantization.importers.sparse24 import import_sparse

__all__ = ["SOURCES", "import_block_scaled", "import_gate_up", "import_sparse", "import_weight"]

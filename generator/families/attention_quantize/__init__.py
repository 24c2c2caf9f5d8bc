"""q, k and v of attention in 8 bits: scales of rows and tiles, k smoothed, v transposed."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.attention_quantize.schedule import (
    CHUNK,
    TILE,
    VALUES,
    AttentionQuantizeOperation,
    AttentionQuantizeProblem,
    AttentionQuantizeSchedule,
    AttentionQuantizeShape,
    AttentionQuantizeSpec,
)
from warploom.generator.families.base import Family

__all__ = [
    "FAMILY",
    "AttentionQuantizeOperation",
    "AttentionQuantizeProblem",
    "AttentionQuantizeSchedule",
    "AttentionQuantizeShape",
]


class AttentionQuantize(
    Family[
        AttentionQuantizeOperation,
        AttentionQuantizeSchedule,
        AttentionQuantizeShape,
        AttentionQuantizeProblem,
    ]
):
    """Operands of attention, quantized."""

    def context(self, spec: AttentionQuantizeSpec) -> dict[str, Any]:
        """The element of the operands, and the sizes that the schedule does not say."""
        operation: AttentionQuantizeOperation = spec.operation
        return {
            "element": element(operation.element),
            "tile": TILE,
            "values": VALUES,
            "chunk": CHUNK,
            # 16 bytes of padding follow each 16 rows.
            "codes_bytes": TILE * operation.dim + TILE,
            "lanes": operation.lanes,
        }


FAMILY = AttentionQuantize()

"""Dense 16-bit weights of quantized ones."""

from __future__ import annotations

from typing import Any

from warploom.generator.families.base import Family
from warploom.generator.families.dequantize.schedule import (
    DequantizeOperation,
    DequantizeProblem,
    DequantizeSchedule,
    DequantizeShape,
    DequantizeSpec,
)

__all__ = [
    "FAMILY",
    "DequantizeOperation",
    "DequantizeProblem",
    "DequantizeSchedule",
    "DequantizeShape",
]

# Formats whose codes and orders are those of another, with scales that decoding has nothing of.
_ALIKE = {"mxfp8": "e4m3", "nvfp4": "mxfp4"}


class Dequantize(
    Family[DequantizeOperation, DequantizeSchedule, DequantizeShape, DequantizeProblem]
):
    """Dense weights."""

    def context(self, spec: DequantizeSpec) -> dict[str, Any]:
        """How codes are decoded, by the parts of mixed_gemm, and what their scales are.

        Weights for 16-bit activations are decoded to bf16, in which codes are exact.
        """
        operation: DequantizeOperation = spec.operation
        shared = {
            "slab_columns": spec.schedule.tile[1],
            "packed": "bf16x2" if operation.w == "bf16" else "f16x2",
        }
        if operation.layout == "rows":
            return shared
        row, order = operation.weight, operation.slab.order
        decoded = row.decoded_as or _ALIKE.get(row.name, row.name)
        number = "bf16" if operation.activations == "16-bit" else operation.activations
        words = "[step / 2], step % 2" if order.steps > 1 else "[step]"
        floats = operation.slab.scale_type.bytes == 4 or not operation.group
        scale = "floats" if floats else operation.scale
        return {
            **shared,
            "slab": operation.slab,
            "decode": f"mixed_gemm/decode/{decoded}_{number}.cuh",
            "number": f"dequantize/number_{number}.cuh",
            "words": words,
            "floats": floats,
            "scales": f"{'dequantize' if scale == 'e4m3' else 'mixed_gemm'}/scales_{scale}.cuh",
            "read": f"dequantize/read_{'group' if operation.group else 'channels'}.cuh",
        }


FAMILY = Dequantize()

"""What a quantization asks of any kernel, for a roofline: memory alone."""

from __future__ import annotations

from warploom.generator.families.cast.schedule import CastOperation
from warploom.generator.families.cast.shape import CastShape
from warploom.generator.shapes import Work


def work(operation: CastOperation, shape: CastShape) -> Work:
    """Count the bytes of a call; the tensor core has nothing to do."""
    return Work(0.0, float(shape.m * shape.n * operation.value_bytes))

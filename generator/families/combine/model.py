"""How long a call takes: its launch, and the traffic of memory."""

from __future__ import annotations

from warploom.generator.families.combine.schedule import CombineOperation, CombineSchedule
from warploom.generator.families.combine.shape import CombineShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2e-6,  # seconds
    "bandwidth": 3.5e12,  # bytes a second of memory
    "block": 1e-7,  # seconds of a multiprocessor for a CTA
}


def seconds(
    constants: Value,
    operation: CombineOperation,
    schedule: CombineSchedule,
    shape: CombineShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    moved = shape.tokens * (1 + shape.k * (1 + operation.dot)) * shape.columns * operation.bytes
    threads = shape.tokens * shape.columns / 8
    if operation.direction == "permute":
        threads = shape.tokens * shape.k * 32
    blocks = threads / schedule.threads / multiprocessors
    return constants["launch"] + max(moved / constants["bandwidth"], blocks * constants["block"])

"""How long a call takes: its launch, and the traffic of memory."""

from __future__ import annotations

from warploom.generator.families.attention_merge.schedule import (
    AttentionMergeOperation,
    AttentionMergeSchedule,
)
from warploom.generator.families.attention_merge.shape import AttentionMergeShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2e-6,  # seconds
    "bandwidth": 4e12,  # bytes a second of memory
    "block": 2e-8,  # seconds of a multiprocessor for a block
}


def seconds(
    constants: Value,
    operation: AttentionMergeOperation,
    schedule: AttentionMergeSchedule,
    shape: AttentionMergeShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    traffic = shape.rows * operation.row_bytes / constants["bandwidth"]
    blocks = shape.rows * schedule.lanes / schedule.threads / multiprocessors
    return constants["launch"] + max(traffic, blocks * constants["block"])

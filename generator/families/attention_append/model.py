"""How long a call takes: its launch, and the traffic of memory."""

from __future__ import annotations

from warploom.generator.families.attention_append.problem import AttentionAppendShape
from warploom.generator.families.attention_append.schedule import (
    AttentionAppendOperation,
    AttentionAppendSchedule,
)
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2.5e-6,  # seconds
    "bandwidth": 4e12,  # bytes a second of memory
    "block": 3e-8,  # seconds of a multiprocessor for a block
}


def seconds(
    constants: Value,
    operation: AttentionAppendOperation,
    schedule: AttentionAppendSchedule,
    shape: AttentionAppendShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    moved = shape.tokens * operation.token_bytes(shape.kv_heads, shape.heads)
    rows = 2 * shape.kv_heads + shape.heads
    blocks = shape.tokens * max(1, rows * operation.lanes / schedule.threads) / multiprocessors
    return constants["launch"] + max(moved / constants["bandwidth"], blocks * constants["block"])

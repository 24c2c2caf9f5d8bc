"""How long a call takes: its launches, and the traffic of memory."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families.attention_quantize.schedule import (
    TILE,
    AttentionQuantizeOperation,
    AttentionQuantizeSchedule,
)
from warploom.generator.families.attention_quantize.shape import AttentionQuantizeShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2.5e-6,  # seconds
    "bandwidth": 4e12,  # bytes a second of memory
    "vectors": 2e-7,  # seconds of an SM for the rows of a tile that a thread has one by one
}


def traffic(operation: AttentionQuantizeOperation, shape: AttentionQuantizeShape) -> int:
    """Bytes of memory that are moved, where every launch reads what it needs from there."""
    keys = shape.batch * shape.kv_heads * shape.seq_k
    rows = shape.batch * shape.heads * shape.seq_q
    if not operation.quantizes:
        return keys * operation.row_bytes()
    again = keys * (1 + operation.smooth) * operation.dim * element(operation.element).bytes
    return (2 * keys + rows) * operation.row_bytes() + again


def seconds(
    constants: Value,
    operation: AttentionQuantizeOperation,
    schedule: AttentionQuantizeSchedule,
    shape: AttentionQuantizeShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    launches = 1 + operation.quantizes  # and of what keys have, v, or k and v
    tiles = shape.batch * (
        launches * shape.kv_heads * -(-shape.seq_k // TILE) + shape.heads * -(-shape.seq_q // TILE)
    )
    resident = multiprocessors * max(1, 2048 // schedule.threads // 2)
    vectors = TILE * operation.lanes / schedule.threads
    turns = max(1.0, tiles / resident) * vectors * constants["vectors"]
    moved = traffic(operation, shape) / constants["bandwidth"]
    return launches * constants["launch"] + max(moved, turns)

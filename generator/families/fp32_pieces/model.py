"""How long a call takes: its launches, and the traffic of memory."""

from __future__ import annotations

from warploom.generator.families.fp32_pieces.schedule import (
    Fp32PiecesOperation,
    Fp32PiecesSchedule,
)
from warploom.generator.families.fp32_pieces.shape import Fp32PiecesShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2e-6,  # seconds
    "peaks_launch": 2e-6,  # seconds of the launch before, next to its traffic
    "bandwidth": 3.5e12,  # bytes a second of memory
    "row": 1.5e-6,  # seconds until what a CTA of a row has loaded is there
}


def seconds(
    constants: Value,
    operation: Fp32PiecesOperation,
    schedule: Fp32PiecesSchedule,
    shape: Fp32PiecesShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    traffic = shape.m * shape.k * operation.value_bytes / constants["bandwidth"]
    if operation.layout == "col":
        before = constants["peaks_launch"] if operation.scaled else 0.0
        return constants["launch"] + before + traffic
    waves = max(1.0, shape.m * schedule.threads / (2048 * multiprocessors))
    turns = waves * -(-shape.k // (4 * schedule.threads)) * constants["row"]
    return constants["launch"] + max(traffic, turns)

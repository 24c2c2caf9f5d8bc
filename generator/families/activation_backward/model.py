"""How long a call takes: its launches, and the traffic of memory where enough is under way."""

from __future__ import annotations

from warploom.generator.families.activation_backward.launch import LEAST_TILES
from warploom.generator.families.activation_backward.schedule import (
    ActivationBackwardOperation,
    ActivationBackwardSchedule,
)
from warploom.generator.families.activation_backward.shape import ActivationBackwardShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2e-6,  # seconds
    "sums_launch": 1.5e-6,  # seconds of adding parts
    "bandwidth": 4e12,  # bytes a second of memory
    "tile": 1e-6,  # seconds until what a tile reads is there
}


def seconds(
    constants: Value,
    operation: ActivationBackwardOperation,
    schedule: ActivationBackwardSchedule,
    shape: ActivationBackwardShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    rows, columns = schedule.tile
    strips, tiles = -(-shape.n // columns), -(-shape.m // rows)
    # Blocks that share a strip's tiles, and how many of these each has.
    parts = max(1, min(tiles / LEAST_TILES, multiprocessors * schedule.ctas_per_sm / strips))
    turns = tiles / parts * max(1, strips / (multiprocessors * schedule.ctas_per_sm))
    traffic = shape.m * shape.n * operation.row_bytes / constants["bandwidth"]
    adding = constants["sums_launch"] if operation.sums and parts > 1 else 0.0
    return constants["launch"] + max(traffic, turns * constants["tile"]) + adding

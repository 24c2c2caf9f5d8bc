"""How long a call takes: its launches, and the traffic of memory."""

from __future__ import annotations

from warploom.generator.families.cast.schedule import VALUES, CastOperation, CastSchedule
from warploom.generator.families.cast.shape import CastShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2e-6,  # seconds
    "amax_launch": 2e-6,  # seconds of the launch before, next to its traffic
    "bandwidth": 4e12,  # bytes a second of memory
    "row": 1.5e-6,  # seconds until what a thread of a row has loaded is there
}


def seconds(
    constants: Value,
    operation: CastOperation,
    schedule: CastSchedule,
    shape: CastShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    traffic = shape.m * shape.n * operation.value_bytes / constants["bandwidth"]
    turns = 0.0
    if operation.body == "row":
        threads = 32 if schedule.reduce == "warp" else schedule.threads
        resident = 2048 * multiprocessors // threads
        waves = max(1.0, shape.m / resident)
        turns = 2 * waves * -(-shape.n // (threads * VALUES * schedule.vectors)) * constants["row"]
    before = constants["amax_launch"] if operation.reads_amax or operation.reads_factors else 0.0
    return constants["launch"] + before + max(traffic, turns)

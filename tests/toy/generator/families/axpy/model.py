"""How long a call should take: its launch, the traffic of memory, and blocks that come and go."""

from __future__ import annotations

from warploom.generator.families.axpy.schedule import AxpyOperation, AxpySchedule
from warploom.generator.families.axpy.shape import AxpyShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 2e-6,  # seconds
    "bandwidth": 4e12,  # bytes a second of memory
    "block": 1e-7,  # seconds of a multiprocessor for a block
}


def seconds(
    constants: Value,
    operation: AxpyOperation,
    schedule: AxpySchedule,
    shape: AxpyShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    traffic = 3 * shape.n * operation.type.bytes / constants["bandwidth"]
    blocks = shape.n / schedule.tile[0] / multiprocessors
    return constants["launch"] + traffic + blocks * constants["block"]

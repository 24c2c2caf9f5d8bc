"""Which operations and schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator.architectures import Architecture
from warploom.generator.families.cast.schedule import TILE_THREADS, CastOperation, CastSchedule


def operation_reasons(operation: CastOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    reasons = []
    block = operation.block
    if block == "1x32":
        if operation.q == "int8":
            reasons.append("q int8 of block 1x32: must be e4m3 or e5m2, as mxfp8 has them")
        if operation.static:
            reasons.append("static with block 1x32: must be computed, as e8m0 scales are not read")
        if operation.pow2:
            reasons.append("pow2 with block 1x32: must be left out, as e8m0 has nothing else")
    if operation.transpose and operation.static and block in ("row", "1x128"):
        reasons.append(f"transpose with static {block} scales: must be of x alone or of x.T alone")
    if operation.static and operation.pow2:
        reasons.append("pow2 with static: must be left out, as scales are what they are")
    if operation.gate != "none":
        if operation.x == "fp32":
            reasons.append("x fp32 with a gate: must be fp16 or bf16")
        if not operation.transpose:
            reasons.append("a gate without transpose: must be of both orientations")
    elif operation.gradient:
        reasons.append("gradient without a gate: must be of one")
    if operation.amax and block != "tensor":
        reasons.append(f"amax with block {block}: must be tensor")
    return reasons


def schedule_reasons(
    arch: Architecture, operation: CastOperation, schedule: CastSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    reasons = []
    if operation.body == "tile" and (schedule.threads, schedule.vectors) != (TILE_THREADS, 1):
        reasons.append(
            f"threads {schedule.threads}, vectors {schedule.vectors} of a tile: must be "
            f"{TILE_THREADS} and 1"
        )
    if operation.body != "row" and schedule.reduce != "warp":
        reasons.append(f"reduce {schedule.reduce}: must be warp but for computed scales of rows")
    return reasons

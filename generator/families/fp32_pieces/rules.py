"""Which schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator.architectures import Architecture
from warploom.generator.families.fp32_pieces.schedule import (
    Fp32PiecesOperation,
    Fp32PiecesSchedule,
)

TILE_THREADS = 256


def operation_reasons(operation: Fp32PiecesOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    reasons = []
    if operation.q == "fp16" and operation.count != 2:
        reasons.append(f"count {operation.count} of q fp16: must be 2, which hold the bits of fp32")
    if operation.spans == "wide" and (operation.q, operation.count) != ("bf16", 3):
        told = f"q {operation.q}, count {operation.count} with spans wide"
        reasons.append(f"{told}: must be bf16 and 3, which hold any row")
    return reasons


def schedule_reasons(
    arch: Architecture, operation: Fp32PiecesOperation, schedule: Fp32PiecesSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    if operation.layout == "col" and schedule.threads != TILE_THREADS:
        return [f"threads {schedule.threads} with layout col: must be {TILE_THREADS}"]
    return []

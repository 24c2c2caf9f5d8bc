"""Which operations and schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.families.activation_backward.schedule import (
    VALUES,
    ActivationBackwardOperation,
    ActivationBackwardSchedule,
)

MOST_THREADS = 2048  # of a multiprocessor (CUDA C++ Programming Guide, compute capability 9.0)
REGISTERS = 65_536  # of a multiprocessor
BESIDE = 24  # registers of addresses, of one row's arithmetic; fitted: none of the space spills


def operation_reasons(operation: ActivationBackwardOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    if operation.function != "none":
        return []
    found = []
    if not operation.sums:
        found.append("function none without sums: must be with sums, as it has no other result")
    others = {operation.z, operation.dz}
    if others != {operation.dy}:
        told = f"z {operation.z} and dz {operation.dz} of function none"
        found.append(f"{told}: must be {operation.dy} as dy is, for there is only dy")
    return found


def schedule_reasons(
    arch: Architecture,
    operation: ActivationBackwardOperation,
    schedule: ActivationBackwardSchedule,
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    resident = schedule.threads * schedule.ctas_per_sm
    if resident > MOST_THREADS:
        return [
            f"ctas_per_sm {schedule.ctas_per_sm} of {schedule.threads} threads: a multiprocessor "
            f"has room for {MOST_THREADS} threads"
        ]
    read = operation.tensors[:2]  # dz is written
    bits = sum(element(getattr(operation, name)).bits for name in read)
    registers = schedule.rows * VALUES * bits // 32 + VALUES * operation.sums + BESIDE
    return rules.broken([rules.fits_registers(registers, REGISTERS // resident)])

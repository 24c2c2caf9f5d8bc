"""d = alpha x + y: the smallest family that there can be, for tests and as an example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.generator.architectures import Architecture
from warploom.generator.families.axpy import launch
from warploom.generator.families.axpy.schedule import AxpyOperation, AxpySchedule, AxpySpec
from warploom.generator.families.axpy.shape import AxpyShape
from warploom.generator.families.family import Family
from warploom.generator.families.table import Table
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.parameters import ParameterBlock

LOAD_BYTES = 16  # of the widest load that there is
# Seconds of a launch, bytes a second of memory, seconds in which a block comes and goes.
START = {"launch": 2e-6, "bandwidth": 4e12, "block": 1e-7}


class AxpyTable(Table[AxpyOperation, AxpySchedule, AxpyShape]):
    """What is said of any family holds: the first schedule of a call's class is its own."""


class Axpy(Family[AxpyOperation, AxpySchedule, AxpyShape, AxpyShape]):
    """Sums of two vectors, one of them scaled."""

    operation = AxpyOperation
    schedule = AxpySchedule
    shape = AxpyShape
    table = AxpyTable()
    constants = START

    def schedule_reasons(
        self, arch: Architecture, operation: AxpyOperation, schedule: AxpySchedule
    ) -> list[str]:
        """Why the schedule does not fit the operation."""
        loaded = schedule.values * operation.type.bytes
        if loaded <= LOAD_BYTES:
            return []
        return [f"values {schedule.values} of {operation.element}: a load has {LOAD_BYTES} bytes"]

    def complete(
        self, arch: str, operation: AxpyOperation, fields: Mapping[str, Any]
    ) -> AxpySchedule:
        """Make a schedule of `fields`; `values: auto` becomes as many as one load can bring."""
        given = {name: value for name, value in fields.items() if value != "auto"}
        return AxpySchedule(**{"values": LOAD_BYTES // operation.type.bytes, **given})

    def parameters(self, spec: AxpySpec) -> ParameterBlock[Any]:
        """The parameter block: see launch.py."""
        return launch.parameters(spec)

    def launches(self, spec: AxpySpec, problem: AxpyShape, device: DeviceLimits) -> list[Launch]:
        """The launch of a call: see launch.py."""
        return launch.launches(spec, problem, device)

    def seconds(
        self,
        constants: Mapping[str, float],
        operation: AxpyOperation,
        schedule: AxpySchedule,
        shape: AxpyShape,
        multiprocessors: int,
    ) -> float:
        """The launch, the traffic of memory, and the blocks of one multiprocessor."""
        traffic = 3 * shape.n * operation.type.bytes / constants["bandwidth"]
        blocks = shape.n / schedule.tile[0] / multiprocessors
        return constants["launch"] + traffic + blocks * constants["block"]


FAMILY = Axpy()

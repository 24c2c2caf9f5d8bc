"""Measurements from what the benchmarks recorded: every kernel of ours, right and steady."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warploom.errors import RecordsError, SpecificationError, UnknownNameError
from warploom.generator import json_file
from warploom.generator.families import family
from warploom.generator.model.fit import Measurement
from warploom.generator.records import Records, restore_seconds, restore_shape
from warploom.generator.restore import restore
from warploom.generator.specification import parse_name

STEADY = (
    0.08  # the spread of a time that says something: a host that was late makes it many times that
)


def of_results(path: Path) -> tuple[str, list[Measurement]]:
    """Return the GPU of a document of benchmarks/results, and its kernels' times.

    Kernels with names of other versions are left out. RecordsError for a file that is no such
    document.
    """
    try:
        document = json_file.parse(json_file.content(path))
        machine = document["machine"]
        gpu, count = restore(str, machine["gpu"]), restore(int, machine["multiprocessors"])
        found = [
            measured
            for cell in document["cells"]
            for entry in cell["entries"]
            if (measured := _measurement(cell["problem"], entry, count))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecificationError) as error:
        raise RecordsError(
            f"{path}: {json_file.reason(error)}",
            rule="measurements come from journals, records and results of the benchmarks",
            fix="give one of these, measured on a GPU",
        ) from error
    return gpu, found


def _measurement(
    problem: Mapping[str, Any], entry: Mapping[str, Any], multiprocessors: int
) -> Measurement | None:
    """What an entry of a cell measured; None of what is no kernel of this version, or unsteady."""
    right = entry.get("seconds") and (entry.get("error_share") or 0) <= 1
    right = right and (entry.get("spread") or 0) <= STEADY
    if not right or not entry.get("kernel"):
        return None
    try:
        spec = parse_name(entry["kernel"])
    except UnknownNameError:
        return None
    name, seconds = spec.operation.family, restore_seconds(entry["seconds"])
    extents = family(name).extents_of_cell(problem)
    if extents is None:
        return None
    shape = restore_shape(name, extents)
    return Measurement(spec.operation, shape, spec.schedule, seconds, multiprocessors)


def of_records(records: Records) -> list[Measurement]:
    """Return the times of every contender of `records`."""
    return [
        Measurement(
            record.operation,
            record.shape,
            timed.schedule,
            timed.seconds,
            record.environment.multiprocessors,
        )
        for record in records
        for timed in record.contenders
    ]

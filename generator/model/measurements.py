"""Measurements from what the benchmarks recorded: every kernel of ours that was timed and right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warploom.errors import RecordsError, SpecificationError, UnknownNameError
from warploom.generator import json_file
from warploom.generator.model.fit import Measurement
from warploom.generator.model.shapes import Shape
from warploom.generator.records import Records, restore_seconds, restore_shape
from warploom.generator.restore import restore
from warploom.generator.specification import parse_name

ATTENTION = ("attention_forward", "attention_backward")  # whose cells are alike


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
            f"{path}: {error}",
            rule="measurements come from journals, records and results of the benchmarks",
            fix="give one of these, measured on a GPU",
        ) from error
    return gpu, found


def _measurement(
    problem: Mapping[str, Any], entry: Mapping[str, Any], multiprocessors: int
) -> Measurement | None:
    """What an entry of a cell measured; None where it is not of a kernel of this version."""
    right = entry.get("seconds") and (entry.get("error_share") or 0) <= 1
    if not right or not entry.get("kernel"):
        return None
    try:
        spec = parse_name(entry["kernel"])
    except UnknownNameError:
        return None
    shape, seconds = _shape(spec.operation.family, problem), restore_seconds(entry["seconds"])
    if shape is None:
        return None
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


def _shape(family: str, problem: Mapping[str, Any]) -> Shape | None:
    """The shape of a cell; None where it does not say enough."""
    if family == "gemm" and {"m", "n", "k"} <= problem.keys():
        extents = {name: problem[name] for name in ("m", "n", "k")}
        return restore_shape(family, {**extents, "batches": problem.get("batch", 1)})
    if family in ATTENTION and "seq" in problem and not problem.get("lengths"):
        seq, window = problem["seq"], problem.get("window")
        extents = {name: problem[name] for name in ("batch", "heads", "kv_heads", "dim")}
        within = 0 if window is None else window + 1
        return restore_shape(family, {**extents, "seq_q": seq, "seq_k": seq, "window": within})
    return None

"""Measurements from what the benchmarks recorded: every kernel of ours that was timed and right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warploom.errors import RecordsError, UnknownNameError
from warploom.generator.model.fit import Measurement
from warploom.generator.model.shapes import AttentionShape, GemmShape, Shape
from warploom.generator.records import Records
from warploom.generator.specification import parse_name

ATTENTION = ("attention_forward", "attention_backward")  # whose cells are alike


def of_results(path: Path) -> tuple[str, list[Measurement]]:
    """Return the GPU of a document of benchmarks/results, and its kernels' times.

    Kernels with names of other versions are left out. RecordsError for a file that is no such
    document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = document["machine"]
        gpu, count = machine["gpu"], machine["multiprocessors"]
        cells = [
            (cell["problem"], entry) for cell in document["cells"] for entry in cell["entries"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordsError(
            f"{path}: {error}",
            rule="measurements come from journals, records and results of the benchmarks",
            fix="give one of these, measured on a GPU",
        ) from error
    found = []
    for problem, entry in cells:
        right = entry.get("seconds") and (entry.get("error_share") or 0) <= 1
        if not right or not entry.get("kernel"):
            continue
        try:
            spec = parse_name(entry["kernel"])
        except UnknownNameError:
            continue
        shape = _shape(spec.operation.family, problem)
        if shape is not None:
            measured = Measurement(spec.operation, shape, spec.schedule, entry["seconds"], count)
            found.append(measured)
    return gpu, found


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
        return GemmShape(problem["m"], problem["n"], problem["k"], problem.get("batch", 1))
    if family in ATTENTION and "seq" in problem and not problem.get("lengths"):
        seq, window = problem["seq"], problem.get("window")
        return AttentionShape(
            problem["batch"],
            problem["heads"],
            problem["kv_heads"],
            seq_q=seq,
            seq_k=seq,
            dim=problem["dim"],
            window=0 if window is None else window + 1,
        )
    return None

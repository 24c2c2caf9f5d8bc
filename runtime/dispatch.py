"""Which kernel a product gets: the spec that was given, what was tuned, else a table's schedule.

decision.py weighs records and model; what is chosen without them is the cheapest schedule of a
measured table, configs/gemm/schedules.yaml. No shape is decided by a branch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, cast

import yaml

from warploom.errors import ProblemError, SpecificationError
from warploom.generator import limits, names, rules
from warploom.generator.elements import element
from warploom.generator.families.gemm import (
    FAMILY,
    GemmOperation,
    GemmProblem,
    GemmSchedule,
    GemmShape,
    complete,
    tiles,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec, Schedule
from warploom.runtime.decision import Choice, decide


@cache
def table() -> tuple[dict[str, Any], ...]:
    """The classes of the table, as they stand in the file."""
    text = resources.files("warploom.configs").joinpath("gemm", "schedules.yaml").read_text()
    return tuple(yaml.safe_load(text)["classes"])


def choose(
    operation: GemmOperation,
    problem: GemmProblem,
    store: str,
    spec: KernelSpec | None,
    device: DeviceLimits,
) -> Choice:
    """Return the kernel for a problem whose D can be stored as `store` (tma or direct).

    Raises ProblemError for an operation that is not legal, and for a given `spec` that computes
    another one or cannot store D.
    """
    if reasons := rules.fields(operation) or FAMILY.operation_reasons(operation):
        value, _, rule = reasons[0].partition(": ")
        fix = "convert the operands, or choose another out_dtype or epilogue"
        raise ProblemError(value, rule=rule, fix=fix)
    if spec is not None:
        return Choice(_checked(spec, operation, store), "the spec that was given")
    return decide(
        operation,
        GemmShape(problem.m, problem.n, problem.k, problem.batches),
        device,
        default=lambda: untuned(operation, problem, store, device),
        legal=lambda schedule: fitting(operation, schedule, store, device.arch),
        portfolio=lambda: _portfolio(operation, store, device.arch),
    )


def untuned(
    operation: GemmOperation, problem: GemmProblem, store: str, device: DeviceLimits
) -> Choice:
    """Return the table's choice for a legal operation: what there is without tuning.

    Schedules that must store D directly come after those that need not.
    """
    best: tuple[bool, float, KernelSpec] | None = None
    refusal: SpecificationError | None = None
    for row in _class(operation, problem)["schedules"]:
        if problem.k < row.get("k", 0):
            continue
        try:
            candidate = _candidate(operation, row, store, device.arch)
        except SpecificationError as error:
            refusal = error
            continue
        schedule = cast("GemmSchedule", candidate.schedule)
        time = waves(schedule, problem, device) * row["cost"]
        if best is None or (schedule.store != store, time) < best[:2]:
            best = schedule.store != store, time, candidate
    if best is None:
        raise cast("SpecificationError", refusal)
    return Choice(best[2], f"least waves * cost ({best[1]:.2f}) of its class in the table")


def fitting(
    operation: GemmOperation, schedule: Schedule, store: str, arch: str
) -> KernelSpec | None:
    """Return the kernel of a schedule that was recorded, for a D that is stored as `store`.

    None where the two do not go together.
    """
    found = cast("GemmSchedule", schedule)
    if store == "direct":
        found = replace(found, store="direct")
    try:
        return KernelSpec(arch, operation, found)
    except SpecificationError:
        return None


def _portfolio(operation: GemmOperation, store: str, arch: str) -> Iterator[KernelSpec]:
    """Every schedule of the table that an operation can have: what the model may choose from."""
    for row in table():
        if row["bits"] == element(operation.a).bits:
            for fields in row["schedules"]:
                try:
                    yield _candidate(operation, fields, store, arch)
                except SpecificationError:
                    continue


def _candidate(operation: GemmOperation, row: dict[str, Any], store: str, arch: str) -> KernelSpec:
    """The kernel of a row of the table; D is stored directly where the row cannot by TMA."""
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    fields = {key: value for key, value in fields.items() if key not in ("cost", "k")}
    try:
        return KernelSpec(arch, operation, complete(arch, operation, {**fields, "store": store}))
    except SpecificationError:
        if store == "direct":
            raise
    return _candidate(operation, row, "direct", arch)


def waves(schedule: GemmSchedule, problem: GemmProblem, device: DeviceLimits) -> int:
    """How many tiles the busiest multiprocessor gets."""
    return -(-tiles(schedule, problem) // device.clusters(schedule.cluster_size))


def _class(operation: GemmOperation, problem: GemmProblem) -> dict[str, Any]:
    bits, layouts = element(operation.a).bits, [operation.layout_a, operation.layout_b]
    rows = min(problem.m, limits.LARGEST)  # of more, launches say that they are too many
    return next(
        row
        for row in table()
        if row["bits"] == bits
        and row["m"][0] <= rows <= row["m"][1]
        and row.get("layouts", layouts) == layouts
        and row.get("accumulation", "fast") == operation.accumulation
    )


def _checked(spec: KernelSpec, operation: GemmOperation, store: str) -> KernelSpec:
    if not isinstance(spec.operation, GemmOperation) or spec.operation != operation:
        raise ProblemError(
            f"spec {spec.name}",
            rule=f"computes another operation; this call needs {names.full(operation)}",
            fix="leave spec out, or pass one of this operation",
        )
    if cast("GemmSchedule", spec.schedule).store == "tma" and store == "direct":
        raise ProblemError(
            f"spec {spec.name}",
            rule="stores by TMA: D's address, rows and pitch are multiples of 16 bytes, and "
            "epilogue operands start at pairs",
            fix="use a spec with store: direct, or leave spec out",
        )
    return spec

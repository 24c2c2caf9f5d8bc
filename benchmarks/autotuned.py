"""Cells whose problems are tuned between calls before they are measured, as users' calls tune them.

What is found decides the calls of this process, and goes to no file that stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import machine
from benchmarks.families import BEFORE, Asked, Case
from benchmarks.wording import right
from warploom.runtime import plan, records
from warploom.tuning.autotune.api import autotune
from warploom.tuning.autotune.report import Tuned

CALLING = 8  # threads: their calls compile the kernels that they run until their problem is tuned
PATIENCE = 300.0  # seconds, at most, until all problems are tuned
_POLL = 0.05
Told = Callable[[str], None]
Status = Mapping[str, Tuned]  # by what tuning calls a problem


def tuned(
    cases: Sequence[Case], asked: Asked, told: Told = lambda text: None
) -> tuple[list[Case], Asked]:
    """Tune the cells' problems; the cells with what came of it, and what is to be measured now.

    Kernels of all problems are compiled together, and measured once no compiler runs.
    """
    jobs = len(os.sched_getaffinity(0))
    with _own_records(), autotune(jobs=jobs) as tuning, torch.no_grad():
        with ThreadPoolExecutor(CALLING) as threads:
            new = list(threads.map(lambda case: _met(case, asked), cases))
        wanted = [case for case, is_new in zip(cases, new, strict=True) if is_new]
        told(f"{len(wanted)} problems, {jobs} compilers")

        def status() -> Status:
            return {one.problem: one for one in tuning.problems}

        _until(lambda: all(_compiled(status().get(case.tuned)) for case in wanted))
        told("compiled")
        machine.warm()
        for case in wanted:
            _call(case, asked)
        _until(lambda: all(_ended(status().get(case.tuned)) for case in wanted))
        told("tuned")
        found = status()
    plan.forget()  # calls are planned anew, by what was found
    noted = [_noted(case, found.get(case.tuned)) for case in cases]
    before = {one.problem: one.before for one in found.values() if one.before != one.after}
    return noted, replace(asked, before=before)


@contextmanager
def _own_records() -> Iterator[None]:
    """Inside, the user's records are an empty folder, which is gone afterwards."""
    name = "WARPLOOM_RECORDS_DIR"
    kept = os.environ.get(name)
    with TemporaryDirectory() as folder:
        os.environ[name] = folder
        records.forget()
        plan.forget()
        try:
            yield
        finally:
            os.environ.pop(name)
            if kept is not None:
                os.environ[name] = kept


def _met(case: Case, asked: Asked) -> bool:
    """Make a cell's call, which its tuning begins with; False where there is a record."""
    if not case.tuned:
        return False
    ours = _call(case, asked)
    reason = ours.told()[1] if ours.told else ""
    return not reason.startswith(("recorded", "autotuned"))


def _call(case: Case, asked: Asked) -> Any:  # noqa: ANN401 (a contender)
    """Make a cell's call on operands of its own, which are gone when the next is made."""
    ours = case.contenders(asked)[0]
    ours.calls[0]()
    torch.cuda.synchronize()
    return ours


def _compiled(one: Tuned | None) -> bool:
    return _ended(one) or (one is not None and one.status.startswith("waiting"))


def _ended(one: Tuned | None) -> bool:
    return one is not None and one.status.startswith(("tuned", "not tuned"))


def _until(done: Callable[[], bool]) -> None:
    """Wait for the engine's thread; what it has not done in time is told as it stands."""
    end = time.monotonic() + PATIENCE
    while not done() and time.monotonic() < end:
        time.sleep(_POLL)


def _noted(case: Case, one: Tuned | None) -> Case:
    if one is None:
        return case
    return replace(case, problem={**case.problem, "autotuned": asdict(one)})


# ---- What came of it -----------------------------------------------------------------------------

COLUMNS = ("problem", "before us", "after us", "gained", "again", "kernel before", "kernel after")


def table(cells: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """A row for each cell whose kernel changed: times when tuned, their ratio, and that of now."""
    return [
        [
            cell["name"],
            one["before_seconds"] * 1e6,
            one["after_seconds"] * 1e6,
            one["before_seconds"] / one["after_seconds"],
            _again(cell),
            one["before"],
            one["after"],
        ]
        for cell in cells
        if (one := cell["problem"].get("autotuned")) and one["before"] != one["after"]
    ]


def _again(cell: Mapping[str, Any]) -> float | None:
    """The time of the kernel before over that of now, as the cell was measured; both are right."""
    found = {entry["contender"]: entry for entry in cell["entries"]}
    before, now = found.get(BEFORE), cell["entries"][0]
    return before["seconds"] / now["seconds"] if before and right(before) and right(now) else None


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many problems were tuned and changed, and the mean of what all of them gained."""
    told = [one for cell in cells if (one := cell["problem"].get("autotuned"))]
    changed = table(cells)
    sound = table([cell for cell in cells if right(cell["entries"][0])])
    gains = [row[4] or row[3] for row in sound]  # of a kernel whose result is right
    done = [one for one in told if one["status"] == "tuned"]
    return {
        "problems": len(told),
        "tuned": len(done),
        "changed": len(changed),
        "gained": geometric_mean([*gains, *[1.0] * (len(done) - len(gains))]) if done else None,
        "gpu_milliseconds": sum(one["gpu_seconds"] for one in told) * 1e3,
        **({"not tuned": why} if (why := _reasons(told)) else {}),
    }


def _reasons(told: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {one["problem"]: one["status"] for one in told if one["status"] != "tuned"}

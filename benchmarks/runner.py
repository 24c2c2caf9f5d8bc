"""Measures what was asked for, each cell with all its contenders in turns, in one process.

A cell's figure is the fastest peer's time over Warploom's. A peer that is missing, refuses or fails
is a row marked absent, one that answers wrongly a row marked wrong; neither counts as the fastest.
Cells whose times were unsteady are measured once more, and then marked noisy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import warploom
from benchmarks import machine, profiles
from benchmarks.families import Asked, Case, Family, families, group_of
from benchmarks.protocol import summary
from benchmarks.wording import by_kind, kind_name
from warploom.errors import CompilationError, ConfigurationError, ResultError
from warploom.generator.configurations import spaces
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Cell, Sampling, compete
from warploom.tuning.bench import as_json, sound

UNSTEADY = 0.05  # spread of a median that clocks which move make
ALL = "all"
MISSING = 4  # the exit code where a contender that was asked for could not be measured


def named(names: Sequence[str]) -> list[Family]:
    """The families of these names, or whose names begin with one of them; all of none.

    A name of several spaces is that of their families, as for the tuner.
    """
    known = families()
    wanted: set[str] = set()
    for name in names:
        together = {path.parent.name for path in spaces().get(name, ())}
        begun = {own for own in known if f"{own}_".startswith(f"{name}_")}
        if not begun:
            raise ConfigurationError(
                f"family {name!r}", rule=f"there are {', '.join(known)}", fix="name some of them"
            )
        wanted |= together if len(together) > 1 else begun
    return [one for own, one in known.items() if not names or own in wanted]


def offered(found: Sequence[Family]) -> dict[str, list[str]]:
    """What may be asked of these: their sets of cells, peers and types."""
    groups = (name for one in found for name, group in one.groups.items() if group.cases)
    return {
        "cells": [*dict.fromkeys(groups), ALL],
        "peers": list(dict.fromkeys(name for one in found for name in one.peers)),
        "types": list(dict.fromkeys(name for one in found for name in one.kinds)),
    }


def competing(path: Path, *, here: bool = True) -> tuple[KernelSpec, ...]:
    """The kernels of a configuration, built if it is here that they are measured.

    One that does not compile is absent in its cells.
    """
    if here:
        with suppress(CompilationError):
            warploom.warmup(path)
    return tuple(expand_file(path).specs)


def cases(found: Sequence[Family], asked: Asked) -> Iterator[Case]:
    """Every cell that was asked for, one after the other."""
    for one in found:
        for name, group in one.groups.items():
            grid = not asked.cells or ALL in asked.cells
            if not group.cases or not (name in asked.cells or (grid and name in one.grid)):
                continue
            if group.fixed and asked.peers:
                raise ConfigurationError(
                    f"--peers with --cells {name}, of {one.name}",
                    rule="must be left out: these cells are compared with contenders of their own",
                    fix="leave --peers out, or measure these cells apart from others",
                )
            for case in group.cases(asked):
                problem = {"family": one.name, "cells": name, **case.problem}
                case = replace(case, problem=problem)
                if asked.match in case.name and _wanted(case, one, asked):
                    yield case


def _wanted(case: Case, one: Family, asked: Asked) -> bool:
    typed = not asked.types or case.problem.get("type", "") in ("", *asked.types)
    # A kernel that is only compiled has no rows: its group chose it for those that were asked for.
    return typed and (not asked.m or not case.gpu or one.at(case.problem) in asked.m)


class Here:
    """The cells of a run on the GPU of this process, which is warm when the first one begins.

    machine   it, and what else decides times; states: its clocks and so on, before and after
    """

    def __init__(self, found: Sequence[Case], asked: Asked) -> None:
        self._cases, self._asked = found, asked
        self._gpu = any(case.gpu for case in found)
        if self._gpu:
            machine.warm()
        self.machine = machine.machine()
        self.states: list[dict[str, Any]] = []

    def measured(self) -> Iterator[tuple[int, Cell]]:
        """Measure all, one after the other; each with its place."""
        self._note()
        yield from enumerate(measured(self._cases, self._asked))
        self._note()

    def _note(self) -> None:
        if self._gpu:
            self.states.append(machine.state())


def measured(
    found: Sequence[Case], asked: Asked, sampler: Sampling | None = None
) -> Iterator[Cell]:
    """Measure each; a `sampler` stands in for those of the cases."""
    for case in found:
        once = partial(measure, case, asked, sampler)
        yield steadied(once) if case.gpu and case.again else once()


def measure(case: Case, asked: Asked, sampler: Sampling | None = None) -> Cell:
    """Measure a cell once."""
    with torch.set_grad_enabled(case.gradients):
        contenders = case.contenders(asked)
        timed = compete(
            case.name,
            case.problem,
            contenders,
            case.floor,
            sampler=sampler or case.sampler,
            rounds=case.rounds,
            discarded=case.discarded,
        )
        cell = sound(timed)
        if asked.profile and cell.entries[0].seconds:
            found = profiles.profiled(contenders[0].calls[0])
            cell = replace(cell, problem={**cell.problem, "profile": found})
        return cell


def steadied(once: Callable[[], Cell]) -> Cell:
    """Measure a cell; where its times are unsteady once more, and mark it where they are again."""
    cell = once()
    if unsteady(cell):
        cell = once()
    if unsteady(cell):
        cell = replace(cell, problem={**cell.problem, "noisy": True})
    return cell


def unsteady(cell: Cell) -> bool:
    """True when the spread of Warploom's or its fastest peer's times is more than noise."""
    return any((entry.spread or 0) > UNSTEADY for entry in cell.entries[:2] if entry.right)


# ---- What is said of them ------------------------------------------------------------------------


def conclusions(found: Sequence[Cell]) -> dict[str, dict[str, object]]:
    """Of all, and of each kind where there are several: verdicts, and the mean of the ratios."""
    cells = [as_json(cell) for cell in found]
    compared = [cell for cell in cells if not group_of(cell).listed]
    kinds = by_kind(compared, kind_name)
    each = {f"summary, {kind}": summary(own) for kind, own in kinds.items()}
    whole = {"summary": summary(compared)} if compared else {}
    return {**whole, **(each if len(each) > 1 else {})}


def missing(found: Sequence[Cell]) -> dict[str, str]:
    """Each peer that was absent or wrong somewhere, and why it first was."""
    told: dict[str, str] = {}
    for cell in found:
        for entry in cell.entries[1:]:
            if not entry.right:
                why = entry.absent or f"wrong: {entry.error_share:.3g} times its bound"
                told.setdefault(entry.contender, f"{cell.name}: {why}")
    return told


def exit_code(found: Sequence[Cell], *, allow_missing: bool) -> int:
    """3 where a result of Warploom's is wrong, 4 where it or (unless allowed) a peer is missing."""
    if any(cell.verdict == "wrong" for cell in found):
        return ResultError.exit_code
    lacking = any(cell.entries[0].absent for cell in found)
    return MISSING if lacking or (missing(found) and not allow_missing) else 0

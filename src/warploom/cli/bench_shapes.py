"""`warploom bench FAMILY|FILE --shapes ...`: a user's own shapes, compared with the same in torch.

It needs no checkout: what it measures is in the package.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom import line_json
from warploom.atomic_file import replace_file
from warploom.cli.arguments import STANDARD_INPUT
from warploom.cli.operations import Fields, operations_of
from warploom.errors import CompilationError, ConfigurationError, ResultError

if TYPE_CHECKING:
    from warploom.cli.output import Output
    from warploom.runtime.contest import Cell

COLUMNS = ("us", "us / Warploom's", "spread", "error / bound", "contender")
SCHEMA = 1
ABSENT = 4  # the exit code where Warploom itself could not be measured


def bench(
    output: Output,
    names: Sequence[str],
    fields: Fields,
    epilogue: str,
    shapes: Sequence[str],
    others: Mapping[str, object],
    path: Path | None,
) -> None:
    """Measure the operations of a configuration or a family at these shapes.

    Raises:
        ConfigurationError: There is not one name, or one of the `others`, options that choose among
            the cells of benchmarks/cells.yaml, has a value.
    """
    if len(names) != 1:
        raise ConfigurationError(
            f"--shapes with {' '.join(names) or 'no name'}",
            rule="must be of one family or configuration",
            fix="measure one after the other; `warploom bench --help` has examples",
        )
    for option, value in others.items():
        if value:
            raise ConfigurationError(
                f"{option} with --shapes",
                rule="chooses among the cases of benchmarks/cells.yaml, and shapes are your own",
                fix="leave one of them out",
            )
    file = STANDARD_INPUT if names[0] == "-" else Path(names[0])
    # These import torch, which takes seconds.
    from warploom.generator.build import build_many
    from warploom.runtime.targets import at_hand
    from warploom.tuning.bench import chosen, measured, ratio
    from warploom.tuning.problems import shapes_of
    from warploom.tuning.worker import about, warm

    wanted = [
        (operation, shape)
        for operation in operations_of(file, fields, epilogue)
        for shape in shapes_of(operation, shapes, None, ())
    ]
    found = about()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)  # or fail before anything is measured
    target = at_hand(0)
    choices = [chosen(operation, shape, target) for operation, shape in wanted]
    specs = list(dict.fromkeys(choice.spec for choice in choices))
    with output.progress("compiling", len(specs)) as advance:
        built = build_many(specs, on_done=lambda spec, _: advance(spec.name))
    if failed := next((one for one in built if isinstance(one, CompilationError)), None):
        raise failed
    warm(lambda: True)
    cells: list[Cell] = []
    output.for_people = True  # the file is for programs
    output.value("GPU", found["gpu"])
    for (operation, shape), choice in zip(wanted, choices, strict=True):
        cells.append(measured(operation, shape, choice))
        _tell(output, cells[-1])
        if path:
            _write(path, names[0], found, cells)
    if path:
        output.value("result", path)
    if ratios := [one for one in map(ratio, cells) if one]:
        output.value("fastest baseline / Warploom, mean", statistics.geometric_mean(ratios))
    if any(cell.verdict == "wrong" for cell in cells):
        output.exit_code = ResultError.exit_code
    elif any(cell.entries[0].absent for cell in cells):
        output.exit_code = ABSENT


def _tell(output: Output, cell: Cell) -> None:
    """Say what became of a problem: its kernel, a row for each contender, and who is absent."""
    ours = cell.entries[0]
    output.line(f"\nproblem  {cell.name}")
    if ours.absent:
        output.line(f"absent   Warploom: {ours.absent}")
    else:
        output.line(f"kernel   {ours.kernel}\nbecause  {cell.problem.get('decision', '')}")
    rows = []
    for one in cell.entries:
        if one.seconds is not None:
            both = ours.right and one.right
            times = one.seconds / ours.seconds if ours.seconds and both else None
            rows.append([one.seconds * 1e6, times, one.spread, one.error_share, one.contender])
    output.table(cell.name, COLUMNS, rows)
    for one in cell.entries[1:]:
        if one.absent:
            output.line(f"absent   {one.contender}: {one.absent}")
    output.line(f"verdict  {_verdict(cell)}")


def _verdict(cell: Cell) -> str:
    if cell.verdict == "absent":
        return "no baseline was measured"
    if cell.verdict == "wrong":
        return f"wrong: an error of {cell.entries[0].error_share:.3g} times its bound"
    return f"{cell.verdict}: fastest baseline / Warploom {cell.ratio:.3f}"


def _write(path: Path, name: str, found: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """Replace the result by all cells so far: a run may be ended."""
    import torch

    from warploom import __version__
    from warploom.tuning.bench import as_json

    machine = {**found, "torch": torch.__version__, "cuda_of_torch": torch.version.cuda}
    document = {
        "schema": SCHEMA,
        "benchmark": f"shapes of {name}",
        "machine": {"date": date.today().isoformat(), "warploom": __version__, **machine},
        "cells": [as_json(cell) for cell in cells],
    }
    replace_file(path, line_json.dumps(document))

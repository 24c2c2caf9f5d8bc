"""`warploom records`: look at tuned results, compare and merge them, and fit the model to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from warploom.atomic_file import replace_file
from warploom.cli import SuggestingGroup
from warploom.cli.arguments import ANY_FILE
from warploom.cli.output import Output, reporting
from warploom.errors import (
    ConfigurationError,
    RecordsError,
    SpecificationError,
    UnknownNameError,
)

if TYPE_CHECKING:
    from warploom.generator.model.fit import Measurement
    from warploom.generator.records import Record, Records
    from warploom.generator.shapes import Shape
    from warploom.generator.specification import Operation, Schedule

COLUMNS = ("us", "default / best", "nvrtc", "revision", "measured", "noisy", "problem", "schedule")
DIFFERENCES = ("gain", "problem", "old schedule", "new schedule")


@click.group("records", cls=SuggestingGroup)
def command() -> None:
    """Show, merge and learn from what was tuned.

    \b
    Examples:
      warploom records show --gpu h200
      warploom records merge team.json mine.json
    """


@command.command()
@click.argument("paths", nargs=-1, type=ANY_FILE)
@click.option("--family", "name", help="Only of this family.")
@click.option("--type", "element", help="Only with operands or results of this type, such as bf16.")
@click.option("--shape", help="Only of this shape, as the table has it; * stands for anything.")
@click.option("--gpu", default="", help="Only of this GPU kind, or of those with this in a name.")
@reporting
def show(
    output: Output,
    paths: Sequence[Path],
    name: str | None,
    element: str | None,
    shape: str | None,
    gpu: str,
) -> None:
    """List the tuned configs of PATHS, or of the package and of your tuning database.

    `us` is the time of the best schedule in microseconds, `default / best` how many times as
    long the untuned default takes; what is `noisy` was measured under unsteady clocks.

    \b
    Examples:
      warploom records show --gpu h200
      warploom records show --family gemm --type bf16 --shape '*x6144x4096'
      warploom records show mine.json --json
    """
    from warploom.generator import records_file
    from warploom.generator.records import to_plain

    wanted = _filter(name, element, shape)
    every = [(path, records_file.read(path)) for path in paths or records_file.every()]
    asked = _gpus(gpu, {records.gpu for _, records in every})
    found = [
        (path, records.gpu, [one for one in records if wanted(one)])
        for path, records in every
        if records.gpu in asked
    ]
    if output.as_json:
        for path, kind, listed in found:
            output.value(str(path), {"gpu": kind, "records": list(map(to_plain, listed))})
        return
    for path, kind, listed in found:
        output.total(str(path), f"{kind}, {len(listed)} records")
        output.table(str(path), COLUMNS, [_row(one) for one in listed])
    if not any(listed for _, _, listed in found):
        output.line("no records of these" if every else "no records: `warploom tune` makes them")
    own = {kind for _, kind, _ in found}
    for told in _borrowers([one for one in asked if one not in own]) if gpu and not paths else ():
        output.line(told)


def _gpus(written: str, tuned: Iterable[str]) -> list[str]:
    """The GPU kind that is called so, as --gpu of all commands takes it; else those like it.

    A MIG slice is a kind, too. `h20` is the H20 alone, and no H200.
    """
    from warploom.generator.gpus import KINDS, resolve

    with suppress(UnknownNameError):
        return [resolve(written, tuned, counted=" mig " in written.casefold())]
    known = dict.fromkeys((*KINDS, *sorted(tuned)))
    return [name for name in known if written.casefold() in name.casefold()]


def _borrowers(kinds: Iterable[str]) -> list[str]:
    """What decides on GPU kinds that have no records of their own."""
    from warploom.generator.gpus import lenders
    from warploom.generator.records_file import shipped

    return [
        f"{name} has no records: calls borrow those of {lender.name}, rescaled"
        for name in kinds
        for lender in [one for one in lenders(name) if shipped(one.name)][:1]
    ]


def _filter(name: str | None, type_name: str | None, shape: str | None) -> Callable[[Record], bool]:
    """Which records are wanted; UnknownNameError for a family or type that there is not."""
    from warploom.generator.elements import element
    from warploom.generator.families import family

    of_family = family(name).name if name else None
    of_type = element(type_name).name if type_name else None

    def wanted(record: Record) -> bool:
        return (
            of_family in (None, record.operation.family)
            and of_type in (None, *asdict(record.operation).values())
            and (shape is None or fnmatchcase(str(record.shape), shape))
        )

    return wanted


def _row(record: Record) -> list[object]:
    from warploom.generator import names
    from warploom.generator.records import problem_text

    return [
        record.best.seconds * 1e6,
        record.speedup,
        record.environment.nvrtc,
        record.environment.revision,
        record.measured[:10],
        record.noisy,
        problem_text(record.operation, record.shape),
        names.short(record.best.schedule),
    ]


@command.command()
@click.argument("target", type=ANY_FILE)
@click.argument("sources", nargs=-1, required=True, type=ANY_FILE)
@reporting
def merge(output: Output, target: Path, sources: Sequence[Path]) -> None:
    """Merge the tuned configs of SOURCES into TARGET, which is made if missing.

    Where several files have the same shape, the one that was measured last is kept.

    \b
    Examples:
      warploom records merge team.json mine.json theirs.json
    """
    from warploom.generator import records_file

    read = [records_file.read(source) for source in sources]  # all of them, before any is merged
    gpus = {records.gpu for records in read}
    if len(gpus) > 1:
        raise RecordsError(
            f"records of {', '.join(sorted(gpus))}",
            rule="a file is of one GPU kind",
            fix="merge those of each kind by themselves",
        )
    merged = records_file.update(target, gpus.pop(), [one for records in read for one in records])
    output.value("records", len(merged))
    output.value("file", target)


@command.command()
@click.argument("old", type=ANY_FILE)
@click.argument("new", type=ANY_FILE)
@reporting
def diff(output: Output, old: Path, new: Path) -> None:
    """Say which shapes run another schedule by NEW than by OLD, and by how much it is faster.

    `gain` is the old schedule's time over the new one's, where one of the files timed both; it is
    less than 1 where the new one takes longer. Shapes that only one of the files has run what is
    near, or the default, by the other.

    \b
    Examples:
      warploom records diff old.json new.json
    """
    from warploom.generator import names, records_file
    from warploom.generator.records import problem_text
    from warploom.generator.records_difference import differences

    before, after = records_file.read(old), records_file.read(new)
    found = differences(before, after)
    rows = []
    for one in found:
        known = one.new or one.old
        schedules = [record and names.short(record.best.schedule) for record in (one.old, one.new)]
        told = problem_text(known.operation, known.shape) if known else ""
        rows.append([one.gain, told, *schedules])
    output.for_people = True
    output.table("differences", DIFFERENCES, rows)
    counts = {
        "other schedule": sum(bool(one.old and one.new) for one in found),
        f"only in {old}": sum(one.new is None for one in found),
        f"only in {new}": sum(one.old is None for one in found),
    }
    output.total("problems", counts)


@command.command()
@click.argument("sources", nargs=-1, required=True, type=ANY_FILE)
@click.option(
    "--out", type=ANY_FILE, help="The file of constants; configs/model has the shipped ones."
)
@click.option(
    "--unseen",
    multiple=True,
    type=ANY_FILE,
    help="Sweeps to hold the constants against, of problems that SOURCES do not have; may repeat.",
)
@reporting
def fit(output: Output, sources: Sequence[Path], out: Path | None, unseen: Sequence[Path]) -> None:
    """Fit the cost model's constants to journals, tuned configs and results of the benchmarks.

    Constants of families that SOURCES do not have stay as --out has them. A cost model decides
    alone only where sweeps that it was not fitted to (`warploom bench gemm --problems SEED --specs
    FILE`, `warploom tune --exhaustive`) found it good.

    \b
    Examples:
      warploom records fit seen.json --unseen unseen.json --out nvidia_h200.json
    """
    from warploom.generator.model import constants as files
    from warploom.generator.model.fit import fit as fitted

    gpus, measured = _measurements(sources, output.warning)
    if len(gpus) > 1:
        raise ConfigurationError(
            f"measurements of {', '.join(sorted(gpus))}",
            rule="constants are of one GPU kind",
            fix="fit each by itself",
        )
    known = files.read(out) if out and out.exists() else None
    if known and {known.gpu} != gpus:
        raise ConfigurationError(
            f"{out}: constants of {known.gpu}",
            rule=f"a file is of one GPU kind, and SOURCES are of {', '.join(gpus) or 'none'}",
            fix="give --out another file",
        )
    others, held = _measurements(unseen, output.warning)
    if not others <= gpus:
        raise ConfigurationError(
            f"unseen sweeps of {', '.join(sorted(others))}",
            rule=f"must be of {', '.join(gpus)}",
            fix="leave those of other GPUs out",
        )
    constants = fitted(next(iter(gpus), ""), measured, known, _legal(), held, _choosable)
    rows = [
        [
            name,
            one.measurements,
            one.problems,
            one.error,
            one.quality and one.quality.problems,
            one.quality and one.quality.first,
            one.quality and one.quality.kept,
        ]
        for name, one in constants.families.items()
    ]
    columns = ["family", "measurements", "problems", "median error"]
    output.table("fit", [*columns, "swept", "first / best", "best of 12 within 3 %"], rows)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, files.text(constants))
        output.value("file", out)
    else:
        output.text("constants", files.text(constants))


def _legal() -> Callable[[Operation, Shape], int]:
    """How many schedules the package's spaces have that suit a problem."""
    from warploom.generator.configurations import spaces
    from warploom.generator.families import family
    from warploom.generator.space import expand_file

    @cache  # and not before a sweep asks: it takes seconds
    def schedules() -> dict[Operation, list[Schedule]]:
        found: dict[Operation, list[Schedule]] = {}
        for path in {path for paths in spaces().values() for path in paths}:
            for spec in expand_file(path).specs:
                found.setdefault(spec.operation, []).append(spec.schedule)
        return found

    def count(operation: Operation, shape: Shape) -> int:
        table = family(operation.family).table
        return sum(table.suits(one, shape) for one in schedules().get(operation, ()))

    return count


def _choosable(operation: Operation, shape: Shape) -> list[Schedule]:
    """What the model chooses among for dense tensors of a problem, where it decides."""
    from warploom.generator.families import family
    from warploom.generator.gpus import DEFAULT

    table = family(operation.family).table
    if not table.modelled(operation):
        return []
    found = table.kernels(operation, shape, DEFAULT.arch, table.required(operation, shape))
    return [one.schedule for one in found if table.suits(one.schedule, shape)]


def _measurements(
    sources: Sequence[Path], warn: Callable[[str], None]
) -> tuple[set[str], list[Measurement]]:
    """The GPUs and the measurements of journals, records and results of the benchmarks.

    Journals are taken together: a schedule that several of them have is one measurement. Kernels
    of other versions, which this one finds illegal, are left out with a warning: no model has
    seconds for them.
    """
    from warploom.generator.gpus import kind
    from warploom.generator.model.measurements import of_records, of_results
    from warploom.tuning import journal

    gpus: set[str] = set()
    journals: list[list[journal.Entry]] = []
    measured: list[Measurement] = []
    results: list[Measurement] = []  # those of benchmarks
    for path in sources:
        if path.suffix == ".jsonl" or journal.begins(path):
            entries = journal.read(path)
            found = {entry.environment.gpu for entry in entries}
            if len(found) > 1:  # one whose run ended before it measured has none
                raise RecordsError(
                    f"{path}: {len(found)} GPU kinds",
                    rule="a journal is of one",
                    fix="give another",
                )
            gpus |= found
            journals.append(entries)
        else:
            records = _records(path)
            gpu, others = (
                of_results(path) if records is None else (records.gpu, of_records(records))
            )
            gpus.add(gpu)
            measured += others
            results += others if records is None else []
    every = journal.measurements(*journals, results=results) + measured
    arch = kind(next(iter(gpus), "")).arch
    legal = [one for one in every if _legal_kernel(arch, one)]
    if left := len(every) - len(legal):
        warn(f"{left} of {len(every)} measurements are of kernels that are not legal: left out")
    return gpus, legal


def _legal_kernel(arch: str, measured: Measurement) -> bool:
    """Whether this version makes the kernel that was measured."""
    from warploom.generator.specification import KernelSpec

    with suppress(SpecificationError):
        return bool(KernelSpec(arch, measured.operation, measured.schedule))
    return False


def _records(path: Path) -> Records | None:
    """The file of records; None where it is a result of a benchmark."""
    from warploom.generator import json_file, records_file

    with suppress(OSError, ValueError):  # which are told as those of a file of records
        document = json_file.parse(json_file.content(path))
        if isinstance(document, dict) and "machine" in document:
            return None
    return records_file.read(path)

"""Holds tuning runs against each other and against sweeps, by what they recorded.

`python -m benchmarks.tuning runs FIRST SECOND` says of two files of records in how many problems
the second run chose what the first did, or what is tied with it by the times of either run or, with
`--measure`, in one loop on a GPU; `sweep RECORDS JOURNAL` how far each pick is from the best of an
exhaustive sweep; `default RECORDS` measures each pick beside the untuned default once more, on a
GPU. The journals of runs lie beside their records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import click

from warploom.errors import WarploomError
from warploom.generator import records_file
from warploom.generator.gpus import kind
from warploom.generator.records import Record, problem_key, problem_text
from warploom.generator.specification import KernelSpec, Schedule
from warploom.tuning import journal
from warploom.tuning.gpu import Batch, Gpu, GpuProcess, visible
from warploom.tuning.journal import Entry, Result
from warploom.tuning.search import band
from warploom.tuning.tuner import FINAL_PRECISION, FINAL_SETS

ALIKE, WITHIN = 0.95, 1.02  # what is asked of two runs, and of a pick beside a sweep

Key = tuple[str, ...]
Times = Mapping[Schedule, Result]


@dataclass(frozen=True, slots=True)
class Pair:
    """A problem of two runs: whether they chose alike, and how far the choices are apart."""

    problem: str
    same: bool
    tied: bool
    ratio: float | None


def runs(first: Path, second: Path, gpu: Gpu | None = None) -> list[Pair]:
    """Compare every problem that both files of records have: by a loop on a GPU, if there is one.

    Else picks that differ are compared by what the runs' own journals have of them.
    """
    ours, theirs = _records(first), _records(second)
    shared = ours.keys() & theirs.keys()
    if gpu is not None:
        return [
            _pair(ours[key], theirs[key], [_beside(ours[key], theirs[key], gpu)]) for key in shared
        ]
    measured = [_times(path.with_suffix(".journal.jsonl")) for path in (first, second)]
    return [
        _pair(ours[key], theirs[key], [times.get(key, {}) for times in measured]) for key in shared
    ]


def sweep(records: Path, swept: Path) -> list[tuple[str, float]]:
    """How many times the best of a sweep each pick takes, by the sweep's own times."""
    picks, measured = _records(records), _times(swept)
    found = []
    for key in picks.keys() & measured.keys():
        times = {s: r.relative for s, r in measured[key].items() if r.relative}
        taken = times.get(picks[key].best.schedule)
        if taken:
            found.append((_name(picks[key]), taken / min(times.values())))
    return found


def beside_default(records: Path, gpu: Gpu) -> list[tuple[str, float, float]]:
    """Time each pick beside the default in one loop: its time over the default's, and the noise."""
    found = []
    for record in records_file.read(records):
        if record.default is None:
            continue
        default, best = record.default.schedule, record.best.schedule
        results = _measured(record, (default, best), gpu)
        ratio = results[best].relative or float("inf")
        found.append((_name(record), ratio, band(results[default], results[best])))
    return found


def _measured(record: Record, schedules: Iterable[Schedule], gpu: Gpu) -> Times:
    """Times of schedules for the problem of a record, in one loop."""
    arch = kind(record.environment.gpu).arch
    specs = tuple(KernelSpec(arch, record.operation, one) for one in dict.fromkeys(schedules))
    batch = Batch(record.operation, record.shape, specs, FINAL_PRECISION, FINAL_SETS)
    results = gpu.measure(batch)
    return {spec.schedule: result for spec, result in results.items()}


def _beside(first: Record, second: Record, gpu: Gpu) -> Times:
    """Times of two picks, if they differ."""
    picks = (first.best.schedule, second.best.schedule)
    return {} if picks[0] == picks[1] else _measured(first, picks, gpu)


def _pair(first: Record, second: Record, measured: list[Times]) -> Pair:
    """Alike: the same, or tied by some of the times that were measured."""
    one, other = first.best.schedule, second.best.schedule
    if one == other:
        return Pair(_name(first), same=True, tied=True, ratio=1.0)
    ratios, tied = [], False
    for times in measured:
        found = [times.get(schedule) for schedule in (one, other)]
        if all(result and result.relative for result in found):
            mine, its = (result for result in found if result)
            ratio = (its.relative or 1.0) / (mine.relative or 1.0)
            ratios.append(ratio)
            tied |= max(ratio, 1 / ratio) <= 1 + band(mine, its)
    return Pair(_name(first), same=False, tied=tied, ratio=ratios[0] if ratios else None)


def _records(path: Path) -> dict[Key, Record]:
    return {problem_key(one.operation, one.shape): one for one in records_file.read(path)}


def _times(path: Path) -> dict[Key, Times]:
    """The last result of every correct schedule of every problem of a journal."""
    found: dict[Key, dict[Schedule, Result]] = {}
    for entry in journal.read(path):
        if entry.result.outcome == "correct":
            found.setdefault(_key(entry), {})[entry.result.schedule] = entry.result
    return dict(found)


def _key(entry: Entry) -> Key:
    return problem_key(entry.operation, entry.shape)


def _name(record: Record) -> str:
    return problem_text(record.operation, record.shape)


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group()
def main() -> None:
    """Compare tuning runs and sweeps."""


@main.command("runs")
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
@click.option("--measure", is_flag=True, help="Time picks that differ in one loop on a GPU.")
def compare_runs(first: Path, second: Path, *, measure: bool) -> None:
    """Say in how many problems two runs chose alike; exit with 1 below 95 %."""
    with ExitStack() as stack:
        gpu = stack.enter_context(closing(GpuProcess(visible(1)[0]))) if measure else None
        pairs = runs(first, second, gpu)
    for pair in sorted(pairs, key=lambda pair: pair.problem):
        ratio = "-" if pair.ratio is None else f"{pair.ratio:.3f}"
        told = "same" if pair.same else f"tied {ratio}" if pair.tied else f"differ {ratio}"
        click.echo(f"{pair.problem}: {told}")
    alike = sum(pair.tied for pair in pairs)
    click.echo(f"{alike} of {len(pairs)} alike")
    raise SystemExit(0 if pairs and alike >= ALIKE * len(pairs) else 1)


@main.command("sweep")
@click.argument("records", type=_FILE)
@click.argument("swept", type=_FILE)
def compare_sweep(records: Path, swept: Path) -> None:
    """Say how far picks are from the best of a sweep; exit with 1 above 2 %."""
    found = sweep(records, swept)
    for problem, ratio in sorted(found):
        click.echo(f"{problem}: {ratio:.4f} x the best of the sweep")
    raise SystemExit(0 if found and max(ratio for _, ratio in found) <= WITHIN else 1)


@main.command("default")
@click.argument("records", type=_FILE)
def compare_default(records: Path) -> None:
    """Measure picks beside the default; exit with 1 where one is slower beyond noise."""
    with closing(GpuProcess(visible(1)[0])) as gpu:
        found = beside_default(records, gpu)
    for problem, ratio, noise in found:
        click.echo(f"{problem}: {ratio:.4f} of the default's time, noise {noise:.3f}")
    slower = [one for one in found if one[1] > 1 + one[2]]
    mean = exp(sum(log(ratio) for _, ratio, _ in found) / len(found)) if found else 1.0
    click.echo(f"{len(slower)} of {len(found)} slower; geometric mean {mean:.4f}")
    raise SystemExit(1 if slower or not found else 0)


if __name__ == "__main__":
    try:
        main()
    except WarploomError as error:
        raise SystemExit(f"Error: {error}") from error

"""Runs beside runs and beside sweeps: what counts as alike, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from sweeps import GPU, SHAPES, environment

from benchmarks import tuning
from warploom.atomic_file import replace_file
from warploom.cli import main
from warploom.generator import records_file
from warploom.generator.records import Record, Records, Timed, problem_key
from warploom.generator.specification import KernelSpec, Schedule
from warploom.tuning import journal
from warploom.tuning.gpu import Batch
from warploom.tuning.journal import Result
from warploom.tuning.problems import Problem, problems
from warploom.tuning.replay import Replay


def tuned(space: Path, sweep: Path, path: Path, *flags: str) -> Path:
    options = ["--records", str(path), "--replay", str(sweep), *flags]
    done = CliRunner().invoke(main, ["tune", str(space), "--shapes", ",".join(SHAPES), *options])
    assert done.exit_code == 0, done.output
    return path


def test_two_runs_on_one_sweep_are_alike(space: Path, sweep: Path, tmp_path: Path) -> None:
    first, second = (tuned(space, sweep, tmp_path / f"{name}.json") for name in ("a", "b"))
    pairs = tuning.runs(first, second)
    assert len(pairs) == 3 and all(pair.same for pair in pairs)
    done = CliRunner().invoke(tuning.main, ["runs", str(first), str(second)])
    assert done.exit_code == 0 and "3 of 3 alike" in done.stdout


@pytest.mark.parametrize(
    ("ratio", "error", "tied"),
    [(1.005, 0.0, True), (1.02, 0.0, False), (1.02, 0.015, True), (1.05, 0.2, False)],
)
def test_another_choice_is_alike_only_where_it_is_tied(
    listed: list[Problem], ratio: float, error: float, tied: bool
) -> None:
    one, other, unknown = (spec.schedule for spec in listed[0].space[:3])
    times = {
        one: Result(one, "correct", 1e-5, 0.1, 1.0, error),
        other: Result(other, "correct", ratio * 1e-5, 0.1, ratio, error),
    }

    def record(schedule: Schedule) -> Record:
        best = Timed(schedule, 1e-5, 0.0)
        return Record(listed[0].operation, listed[0].shape, environment(), best, None)

    for first, second in ((one, other), (other, one)):
        pair = tuning._pair(record(first), record(second), [times, {}])
        assert (pair.same, pair.tied) == (False, tied)
    assert tuning._pair(record(one), record(one), [{}, {}]).same
    lost = tuning._pair(record(one), record(unknown), [times, times])
    assert not lost.tied and lost.ratio is None


def test_runs_that_differ_are_told_and_fail(space: Path, sweep: Path, tmp_path: Path) -> None:
    first, second = (tuned(space, sweep, tmp_path / f"{name}.json") for name in ("a", "b"))
    changed = []
    for record in records_file.read(second):
        times = tuning._times(second.with_suffix(".journal.jsonl"))
        own = times[problem_key(record.operation, record.shape)]
        slowest = max(own, key=lambda schedule: own[schedule].relative or 0.0)
        changed.append(replace(record, best=Timed(slowest, 1.0, 0.0)))
    replace_file(second, records_file.text(Records(GPU, tuple(changed))))
    done = CliRunner().invoke(tuning.main, ["runs", str(first), str(second)])
    assert done.exit_code == 1 and done.stdout.count("differ 1.") == 3
    assert "0 of 3 alike" in done.stdout
    measured = tuning.runs(first, second, Replay(journal.read(sweep)))
    assert [(pair.same, pair.tied) for pair in measured] == [(False, False)] * 3
    assert all(pair.ratio and pair.ratio > 1.03 for pair in measured)


@pytest.mark.parametrize(("ratio", "tied"), [(1.008, True), (1.02, False)])
def test_picks_that_no_run_compared_are_compared_in_one_loop(
    space: Path, sweep: Path, tmp_path: Path, ratio: float, tied: bool
) -> None:
    first, second = (tuned(space, sweep, tmp_path / f"{name}.json") for name in ("a", "b"))
    changed = [
        replace(one, best=Timed(replace(one.best.schedule, swizzle_size=3), 1.0, 0.0))
        for one in records_file.read(second)
    ]
    replace_file(second, records_file.text(Records(GPU, tuple(changed))))

    class Loop(Replay):
        def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
            one, other = batch.specs
            return {
                one: Result(one.schedule, "correct", 1e-5, 0.1, 1.0, 0.001),
                other: Result(other.schedule, "correct", ratio * 1e-5, 0.1, ratio, 0.001),
            }

    pairs = tuning.runs(first, second, Loop(journal.read(sweep)))
    assert [(pair.same, pair.tied, pair.ratio) for pair in pairs] == [(False, tied, ratio)] * 3
    assert not any(pair.tied for pair in tuning.runs(first, second))


def test_picks_are_held_against_the_sweep(space: Path, sweep: Path, tmp_path: Path) -> None:
    records = tuned(space, sweep, tmp_path / "a.json")
    found = dict(tuning.sweep(records, sweep))
    assert len(found) == 3 and max(found.values()) <= 1.02 and min(found.values()) >= 1.0
    done = CliRunner().invoke(tuning.main, ["sweep", str(records), str(sweep)])
    assert done.exit_code == 0 and done.stdout.count("x the best of the sweep") == 3


def test_picks_are_measured_beside_the_default(space: Path, sweep: Path, tmp_path: Path) -> None:
    records = tuned(space, sweep, tmp_path / "a.json")
    replay = Replay(journal.read(sweep))
    found = tuning.beside_default(records, replay)
    assert len(found) == 3 and all(ratio <= 1.0 + noise for _, ratio, noise in found)
    assert min(ratio for _, ratio, _ in found) < 0.99


def test_the_space_that_is_swept_is_large_enough_to_be_one() -> None:
    from warploom.generator.model.fit import SWEPT

    path = Path(__file__).parents[2] / "benchmarks" / "gemm_sweep.yaml"
    (one,) = problems(path, ["512x6144x4096"])
    assert SWEPT < len(one.space) < 300
    assert environment().gpu == GPU

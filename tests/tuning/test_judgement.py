"""A record that is judged stays, but for one that is clearly ahead of it or for its own fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as Done
from sweeps import GPU, SHAPES, environment, write_sweep

from warploom.cli import main
from warploom.generator import records_file
from warploom.generator.records import Record, Timed
from warploom.generator.specification import KernelSpec
from warploom.tuning.journal import Outcome, Result
from warploom.tuning.judgement import Judgement
from warploom.tuning.problems import Problem

SHAPE = SHAPES[1]


@pytest.fixture
def problem(listed: list[Problem]) -> Problem:
    return listed[1]


def run(*arguments: object) -> Done:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def recorded(problem: Problem, spec: KernelSpec) -> Record:
    best = Timed(spec.schedule, 1e-5, 0.01)
    return Record(problem.operation, problem.shape, environment(), best, None)


def judged(problem: Problem, present: float, other: float, outcome: Outcome = "correct") -> str:
    default, record, another = problem.space[:3]
    search = Judgement(recorded(problem, record), default, [another])
    wanted = search.wanted()
    assert search.ahead == wanted == [default, record, another]
    times = {default: 1.0, record: present, another: other}
    search.report(
        {
            spec: Result(spec.schedule, "correct", time * 1e-5, 0.0, time)
            for spec, time in times.items()
        }
        | ({record: Result(record.schedule, outcome)} if outcome != "correct" else {})
    )
    assert search.wanted() == []
    return {default: "default", record: "record", another: "another"}[search.winner() or default]


@pytest.mark.parametrize(
    ("present", "other", "stays"), [(0.95, 0.94, True), (0.95, 0.92, False), (1.1, 1.2, False)]
)
def test_a_record_stays_unless_another_is_two_percent_ahead(
    problem: Problem, present: float, other: float, stays: bool
) -> None:
    assert (judged(problem, present, other) == "record") == stays


def test_another_gpu_is_asked_of_the_record_too(problem: Problem) -> None:
    """Else what is a little faster would win: nobody would have said how fast the record is."""
    default, record, another = problem.space[:3]
    search = Judgement(recorded(problem, record), default, [another])
    finals = {
        spec: Result(spec.schedule, "correct", time * 1e-5, 0.0, time, 0.003)
        for spec, time in ((default, 1.0), (record, 0.9), (another, 0.885))
    }
    assert search.rivals(finals) == [default, another, record]
    del finals[record]
    assert search.rivals(finals) == [default, another]


def test_a_record_whose_kernel_is_wrong_today_is_replaced(problem: Problem) -> None:
    assert judged(problem, 0.9, 0.95, "wrong") == "another"


def test_only_records_are_judged_and_one_that_stays_is_not_written_again(
    space: Path, sweep: Path, listed: list[Problem], tmp_path: Path
) -> None:
    records = tmp_path / "records.json"
    options = ("--records", records, "--replay", sweep)
    assert run(space, "--shapes", SHAPE, *options).exit_code == 0
    before = records.read_bytes()
    kept = run(space, "--shapes", SHAPE, *options, "--judge")
    assert kept.exit_code == 0 and "recorded before" in kept.stdout, kept.stderr
    assert records.read_bytes() == before
    unknown = run(space, "--shapes", SHAPES[0], *options, "--judge")
    assert unknown.exit_code == 1 and "no record of a legal kernel to judge" in unknown.stdout


def test_a_record_that_is_far_behind_is_replaced_in_its_file(
    space: Path, problem: Problem, tmp_path: Path
) -> None:
    """What was picked in a loop at the limit of power was up to 29 % behind in a model."""
    records = tmp_path / "records.json"
    slow = max(problem.space, key=lambda spec: spec.schedule.tile[0] == 64)
    sweep = write_sweep(tmp_path / "sweep.jsonl", [problem])
    records_file.update(records, GPU, [replace(recorded(problem, slow), measured="2026-11-22")])
    done = run(space, "--shapes", SHAPE, "--records", records, "--replay", sweep, "--judge")
    assert done.exit_code == 0, done.stderr
    (record,) = records_file.read(records)
    assert record.best.schedule != slow.schedule and record.measured > "2026-11-22"


def test_a_record_of_a_kernel_that_is_not_legal_any_more_is_tuned_anew_and_not_judged(
    space: Path, sweep: Path, problem: Problem, tmp_path: Path
) -> None:
    """Calls pass it over; `tune` said "recorded before", and `tune --judge` ended all problems."""
    records, old = tmp_path / "records.json", recorded(problem, problem.space[0])
    best = replace(old.best.schedule, stages=99)
    records_file.update(records, GPU, [replace(old, best=replace(old.best, schedule=best))])
    options = ("--shapes", SHAPE, "--records", records, "--replay", sweep)
    judged = run(space, *options, "--judge")
    assert judged.exit_code == 1 and "no record of a legal kernel" in judged.stdout, judged.stderr
    assert run(space, *options).exit_code == 0
    (record,) = records_file.read(records)
    assert record.best.schedule != best

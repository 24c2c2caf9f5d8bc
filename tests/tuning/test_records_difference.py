"""What other records change: who compares files before merging them must see every other kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from sweeps import GPU, environment

from warploom.cli import main
from warploom.errors import RecordsError
from warploom.generator import records_file
from warploom.generator.records import Record, Records, Timed
from warploom.generator.records_difference import differences
from warploom.tuning.problems import Problem


def record(problem: Problem, best: int, others: dict[int, float], seconds: float = 1e-5) -> Record:
    """A record whose schedules are of the problem's space, by their place in it."""

    def timed(place: int, taken: float) -> Timed:
        return Timed(problem.space[place].schedule, taken, 0.0)

    return Record(
        *(problem.operation, problem.shape, environment()),
        timed(best, seconds),
        timed(9, 2e-5),
        tuple(timed(place, taken) for place, taken in others.items()),
        measured="2026-01-01T00:00:00+00:00",
    )


def test_a_gain_is_taken_from_a_loop_that_had_both(listed: list[Problem]) -> None:
    one, two, three = listed
    old = [record(one, 0, {}), record(two, 0, {1: 1.2e-5}), record(three, 0, {}, 1e-5)]
    new = [record(one, 1, {0: 1.1e-5}), record(two, 1, {}), record(three, 1, {}, 0.8e-5)]
    found = differences(Records(GPU, tuple(old)), Records(GPU, tuple(new)))
    assert [one.gain for one in found] == pytest.approx([1.1, 1 / 1.2, 1.25])
    assert all(one.old and one.new for one in found)


def test_the_same_schedules_are_no_difference_and_new_problems_are(listed: list[Problem]) -> None:
    one, two, _ = listed
    old = Records(GPU, (record(one, 0, {}),))
    new = Records(GPU, (record(one, 0, {}, 3e-5), record(two, 0, {})))
    (found,) = differences(old, new)
    assert found.old is None and found.new and found.new.shape == two.shape
    (found,) = differences(new, old)
    assert found.new is None and found.gain is None


def test_no_gain_is_made_up_where_defaults_differ(listed: list[Problem]) -> None:
    old, new = record(listed[0], 0, {}), record(listed[0], 1, {})
    new = replace(new, default=Timed(listed[0].space[3].schedule, 1.0, 0.0))
    (found,) = differences(Records(GPU, (old,)), Records(GPU, (new,)))
    assert found.gain is None


def test_two_kinds_do_not_compare() -> None:
    with pytest.raises(RecordsError, match="of one GPU kind"):
        differences(Records(GPU), Records("NVIDIA H100 80GB HBM3"))


def test_the_command_lists_them(listed: list[Problem], tmp_path: Path) -> None:
    one, two, _ = listed
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    records_file.update(paths[0], GPU, [record(one, 0, {})])
    records_file.update(paths[1], GPU, [record(one, 1, {0: 1.1e-5}), record(two, 0, {})])
    done = CliRunner().invoke(main, ["records", "diff", *map(str, paths), "--json"])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["gain"] for row in document["differences"]] == [pytest.approx(1.1), None]
    assert list(document["problems"].values()) == [1, 0, 1]
    assert document["differences"][1]["old schedule"] is None

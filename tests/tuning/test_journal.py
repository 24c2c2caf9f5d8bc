"""The journal: what was measured is there after any end, and nothing damaged is written over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sweeps import entries

from warploom.errors import RecordsError
from warploom.generator.model.fit import Measurement
from warploom.generator.model.shapes import GemmShape, Shape
from warploom.tuning import journal
from warploom.tuning.journal import Entry, Journal, Result
from warploom.tuning.problems import Problem


@pytest.fixture
def some(listed: list[Problem]) -> list[Entry]:
    found = entries(listed[0])[:5]
    wrong = Result(found[1].result.schedule, "wrong", reason="an error of 3 times its bound")
    noisy = replace(found[2].result, noisy=True)
    return [found[0], replace(found[1], result=wrong), replace(found[2], result=noisy), *found[3:]]


def written(path: Path, listed: list[Entry]) -> bytes:
    opened = Journal(path)
    for entry in listed:
        opened.add(entry)
    opened.close()
    return path.read_bytes()


def test_entries_come_back_as_they_were(tmp_path: Path, some: list[Entry]) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, some)
    assert journal.read(path) == some
    opened = Journal(path)
    assert opened.entries == some
    one = some[0]
    assert opened.known(one.operation, one.shape, one.environment) == [e.result for e in some]
    elsewhere = replace(one.environment, nvrtc="13.1")
    assert opened.known(one.operation, one.shape, elsewhere) == []


@pytest.mark.parametrize("lost", [1, 20, 300])
def test_a_last_line_cut_short_is_dropped_and_the_rest_goes_on(
    tmp_path: Path, some: list[Entry], lost: int
) -> None:
    path = tmp_path / "journal.jsonl"
    content = written(path, some)
    path.write_bytes(content[:-lost])
    assert journal.read(path) == some[:-1]
    written(path, some[-1:])
    assert path.read_bytes() == content


def test_a_journal_killed_before_its_first_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"sch')
    Journal(path).close()
    assert journal.read(path) == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda lines: [lines[0], "{" + lines[1], *lines[2:]], ":2: "),
        (lambda lines: [lines[0].replace('"schema": 1', '"schema": 2'), *lines[1:]], "schema 2"),
        (lambda lines: ["[]", *lines[1:]], ":1: "),
        (lambda lines: [*lines[:2], lines[2].replace('"wrong"', '"correct"'), *lines[3:]], ":3: "),
        (lambda lines: [lines[0], lines[1].replace('"correct"', '"odd"'), *lines[2:]], "odd"),
        (lambda lines: [lines[0], lines[1].replace('"m": 16', '"m": "x"'), *lines[2:]], ":2: "),
    ],
)
def test_damaged_journals_are_refused_and_left_as_they_are(
    tmp_path: Path,
    some: list[Entry],
    damage,  # noqa: ANN001 (a function of lines)
    told: str,
) -> None:
    path = tmp_path / "journal.jsonl"
    lines = written(path, some).decode().splitlines()
    content = "\n".join(damage(lines)) + "\n"
    path.write_text(content)
    for read in (journal.read, Journal):
        with pytest.raises(RecordsError, match=told):
            read(path)
    assert path.read_text() == content


def test_measurements_are_relative_ones_times_the_anchor(some: list[Entry]) -> None:
    anchor, other = some[0], some[3]
    assert anchor.result.relative == 1.0
    drifted = replace(anchor, result=replace(anchor.result, seconds=2.0))
    other = replace(other, result=replace(other.result, seconds=9.0, relative=1.1))
    found = journal.measurements([drifted, other, drifted])
    assert {one.schedule: one.seconds for one in found} == {
        anchor.result.schedule: 2.0,
        other.result.schedule: pytest.approx(2.2),
    }


def test_journals_of_the_same_default_are_one_run_whatever_their_clocks(some: list[Entry]) -> None:
    anchor, other = some[0], some[3]
    fast = replace(anchor, result=replace(anchor.result, seconds=2.0))
    slow = replace(anchor, result=replace(anchor.result, seconds=3.0))
    there = replace(other, result=replace(other.result, relative=1.1))
    again = replace(other, result=replace(other.result, relative=1.3))
    found = journal.measurements([fast, there], [slow, again])
    assert {one.schedule: one.seconds for one in found} == {
        anchor.result.schedule: 2.5,
        other.result.schedule: pytest.approx(1.2 * 2.5),
    }


def test_journals_of_two_defaults_are_compared_by_what_both_measured(some: list[Entry]) -> None:
    """Else one schedule had two times, and a sweep a best that only a fast clock made."""
    anchor, other, third = some[0], some[3], some[4]
    fast = replace(anchor, result=replace(anchor.result, seconds=2.0))
    there = replace(other, result=replace(other.result, relative=1.1))
    default = replace(other, result=replace(other.result, relative=1.0, seconds=7.0))
    beside = replace(third, result=replace(third.result, relative=0.5))
    found = journal.measurements([fast, there], [default, beside])
    assert sorted(one.seconds for one in found) == pytest.approx([1.1, 2.0, 2.2])
    alone = journal.measurements([fast], [default, beside])  # nothing tells how these compare
    assert sorted(one.seconds for one in alone) == pytest.approx([3.5, 7.0])


def test_times_are_brought_to_the_scale_of_results_that_have_a_schedule_of_the_problem(
    some: list[Entry],
) -> None:
    """Else a model predicts the clock of a GPU that is kept at its limit of power."""
    anchor, other = some[0], some[3]
    first = replace(anchor, result=replace(anchor.result, seconds=2.0))
    there = replace(other, result=replace(other.result, relative=1.1))

    def result(seconds: float, shape: Shape = anchor.shape) -> Measurement:
        return Measurement(other.operation, shape, other.result.schedule, seconds, 132)

    found = journal.measurements([first, there], results=[result(1.1)])
    assert sorted(one.seconds for one in found) == pytest.approx([1.0, 1.1])
    elsewhere = result(1.1, GemmShape(3, 5, 7))
    found = journal.measurements([first, there], results=[elsewhere])
    assert sorted(one.seconds for one in found) == pytest.approx([2.0, 2.2])


def test_a_line_is_plain_and_short(tmp_path: Path, some: list[Entry]) -> None:
    lines = written(tmp_path / "journal.jsonl", some).decode().splitlines()
    assert json.loads(lines[2])["outcome"] == "wrong"
    assert max(map(len, lines)) < 800

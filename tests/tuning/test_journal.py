"""The journal: what was measured is there after any end, and nothing damaged is written over."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from disks import limited
from sweeps import entries

from warploom.errors import RecordsError
from warploom.generator.families.gemm import GemmShape
from warploom.generator.model.fit import Measurement
from warploom.generator.shapes import Shape
from warploom.tuning import journal
from warploom.tuning.journal import Entry, Journal, Outcome, Result
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


@pytest.mark.parametrize(
    ("outcome", "reason", "known"),
    [
        ("launch error", "CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("launch error", "cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY", False),
        ("illegal", "the measuring process ended with SIGKILL", False),
        ("illegal", "the measuring process ended with SIGSEGV", True),
        ("launch error", "too many resources requested for launch", True),
        ("wrong", "an error of 3 times its bound", True),
    ],
)
def test_a_kernel_that_memory_was_missing_for_is_measured_by_the_next_run(
    outcome: Outcome, reason: str, known: bool, tmp_path: Path, some: list[Entry]
) -> None:
    """Another program had the GPU's memory, and the kernel was never tried again."""
    one = replace(some[0], result=Result(some[0].result.schedule, outcome, reason=reason))
    opened = Journal(tmp_path / "journal.jsonl")
    opened.add(one)
    found = opened.known(one.operation, one.shape, one.environment)
    opened.close()
    assert found == ([one.result] if known else [])


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
        (lambda lines: lines * 2, ":.*: no 'operation'"),  # two journals, one after the other
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


def test_a_line_of_before_has_the_error_of_nine_rounds(tmp_path: Path, some: list[Entry]) -> None:
    path = tmp_path / "journal.jsonl"
    text = written(path, some).decode()
    assert '"error": 0.0013' in text
    path.write_text(text.replace(', "error": 0.0013', ""))
    errors = {one.result.error for one in journal.read(path) if one.result.outcome == "correct"}
    assert errors == {0.004 / 3}


BROKEN = {
    "deep nesting": "[" * 100_000,
    "an integer of 5,000 digits": '{"seconds": ' + "9" * 5000 + "}",
    "UTF-16": '{"seconds": 1}'.encode("utf-16").decode("latin-1"),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seconds", value) for value in (float("nan"), 0.0, -1.0, 1e9, 10**400, True, "1")),
        *(("relative", value) for value in (0.0, float("inf"))),
        *((name, value) for name in ("spread", "error") for value in (-1.0, float("nan"))),
        *(("outcome", value) for value in ("", None, [])),
        *(("reason", 3), ("noisy", "yes"), ("shape", {"m": 0, "n": 1, "k": 1}), ("environment", 3)),
        *(("line", text) for text in BROKEN.values()),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_tampered_line_is_refused_by_its_number_and_the_file_left_as_it_is(
    tmp_path: Path, some: list[Entry], field: str, value: object
) -> None:
    path = tmp_path / "journal.jsonl"
    lines = written(path, some).decode().splitlines()
    lines[1] = str(value) if field == "line" else json.dumps(json.loads(lines[1]) | {field: value})
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(content)
    for read in (journal.read, Journal):
        with pytest.raises(RecordsError, match=r"journal\.jsonl:2: "):
            read(path)
    assert path.read_bytes() == content


def test_what_is_no_file_is_no_journal(tmp_path: Path) -> None:
    """A pipe without a writer would be waited for, without end."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        for read in (journal.read, Journal):
            with pytest.raises(RecordsError, match=path.name):
                read(path)


def test_a_folder_in_place_of_a_journal_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(9):
        with pytest.raises(RecordsError, match="directory"):
            journal.read(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_full_disk_ends_the_journal_with_its_last_whole_line(
    tmp_path: Path, some: list[Entry]
) -> None:
    path = tmp_path / "journal.jsonl"
    opened = Journal(path)
    opened.add(some[0])
    with limited(path.stat().st_size + 100), pytest.raises(RecordsError, match="free some space"):
        opened.add(some[1])
    opened.close()
    assert journal.read(path) == opened.entries == some[:1]
    assert path.read_bytes().endswith(b"\n")


def test_nothing_lies_beside_a_journal_and_one_process_at_a_time_has_it(tmp_path: Path) -> None:
    opened = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(RecordsError, match="one run at a time"):
        Journal(opened.path)
    opened.close()
    Journal(opened.path).close()
    assert list(tmp_path.iterdir()) == [opened.path]


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
    assert max(map(len, lines)) < 950

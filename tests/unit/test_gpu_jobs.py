"""Jobs for GPUs whose time is short: the first that still fits, and commands that can be run."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import gpu_jobs
import pytest
from click.testing import CliRunner

from benchmarks import runner
from warploom.cli import main

ROOT = Path(__file__).parents[2]


def job(name: str, code: str, seconds: float = 60) -> gpu_jobs.Job:
    command = shlex.join([sys.executable, "-c", code])
    return gpu_jobs.Job(name=name, command=command, seconds=seconds)


def run(jobs: list[gpu_jobs.Job], out: Path, seconds: float = 600) -> gpu_jobs.Queue:
    queue = gpu_jobs.Queue(jobs, out, time.monotonic() + seconds)
    queue.work_on("7")
    return queue


def test_a_job_runs_on_its_gpu_and_leaves_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import os; print('on', os.environ['CUDA_VISIBLE_DEVICES']); open('{out}/made', 'w')"
    queue = run([job("one", code)], tmp_path)
    assert not queue.failed and not queue.left
    assert (tmp_path / "one.log").read_text() == "on 7\n" and (tmp_path / "made").exists()
    printed = capsys.readouterr().out
    assert "one on GPU 7" in printed and "exit 0\n  on 7" in printed


def test_a_job_that_needs_more_than_the_time_left_gives_way_to_a_later_one(tmp_path: Path) -> None:
    """An hour's job was begun in the last minute, and stopped."""
    queue = run([job("long", "", 3600), job("short", "")], tmp_path)
    assert [one.name for one in queue.left] == ["long"] and (tmp_path / "short.log").exists()


def test_jobs_that_fail_hang_or_are_no_program_are_told_and_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"

    def monotonic() -> float:
        """The time, which is over once the job has begun that hangs."""
        if not begun.exists():
            return time.monotonic()
        begun.unlink()
        return float("inf")

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(gpu_jobs.run_gpu_tests, "time", clock)
    hangs = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "open('{out}/begun', 'w').close(); time.sleep(3600)"
    )
    jobs = [
        gpu_jobs.Job(name="absent", command="/absent/program", seconds=60),
        job("fails", "raise SystemExit('no such cells')"),
        job("hangs", hangs),
        job("last", "print('done')"),
    ]
    assert run(jobs, tmp_path).failed
    printed = capsys.readouterr().out
    assert "absent on GPU 7" in printed and "No such file" in printed
    assert "exit 1\n  no such cells" in printed and "KeyboardInterrupt" in printed
    assert printed.endswith("exit 0\n  done\n")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[{name: a, command: b}]", "seconds"),
        ("[{name: a/b, command: b, seconds: 1}]", "name"),
        ("[{name: a, command: b, seconds: 1, cells: c}]", "cells"),
        ("a: [", "no list of jobs"),
        ("[{name: a, command: b, seconds: 1}, {name: a, command: c, seconds: 1}]", "named a"),
    ],
)
def test_what_is_no_list_of_jobs_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(click.BadParameter, match=rule):
        gpu_jobs.load(tmp_path / "jobs.yaml")


class _Reached(BaseException):
    """A command has come to where a GPU is needed."""


@pytest.mark.parametrize(
    "one", gpu_jobs.load(ROOT / "benchmarks" / "jobs.yaml"), ids=lambda j: j.name
)
def test_a_command_of_the_jobs_comes_to_where_it_needs_a_gpu(
    one: gpu_jobs.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt set of cases took a machine's time, and measured nothing."""
    program, *words = shlex.split(one.command)

    def here(cases: list[Any], asked: object) -> None:
        raise _Reached if cases else AssertionError("no case")

    monkeypatch.setattr(runner, "Here", here)
    if program == "python":
        assert (ROOT / words[0]).is_file()
    elif words[0] == "bench" and "--shapes" not in words:
        with pytest.raises(_Reached):
            main(words, standalone_mode=False)
    elif words[0] == "tune":  # the whole of it goes through its problems first, for ten seconds
        command = main.get_command(click.Context(main), "tune")
        assert command is not None and command.make_context("tune", words[1:]).params["path"]
    else:
        done = CliRunner().invoke(main, words)
        assert "no GPU" in done.output, done.output

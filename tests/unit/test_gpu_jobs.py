"""Jobs for GPUs whose time is short: the first that still fits, and commands that can be run."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
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
    assert printed.startswith("one: exit 0 on GPU 7, ") and printed.endswith("\n  on 7\n")


def test_a_job_draws_a_seed_of_its_own(tmp_path: Path) -> None:
    """Problems of a seed that stands in the list are known to whoever writes the tables."""
    names = [f"draws{index}" for index in range(4)]
    run([job(name, "print({seed})") for name in names], tmp_path)
    drawn = [int((tmp_path / f"{name}.log").read_text()) for name in names]
    assert len({*drawn}) > 1, drawn


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
    assert "absent: exit 127 on GPU 7" in printed and "No such file" in printed
    assert "fails: exit 1 on GPU 7" in printed and "\n  no such cells\n" in printed
    assert "hangs: exit -2 on GPU 7" in printed and "KeyboardInterrupt" in printed
    assert "last: exit 0 on GPU 7" in printed and printed.endswith("\n  done\n")


def test_a_job_that_hangs_leaves_time_for_others(tmp_path: Path) -> None:
    """A job of 300 s could take all of 500 s."""

    def most(*seconds: float, left: float = 500) -> float:
        jobs = [job(str(index), "", one) for index, one in enumerate(seconds)]
        taken = gpu_jobs.Queue(jobs, tmp_path, time.monotonic() + left).next()
        assert taken is not None and taken[0].name == "0"
        return taken[1]

    assert most(300, 100) == pytest.approx(375)  # a quarter more
    assert most(100, 100) == pytest.approx(250, abs=1)  # half of the time
    assert most(40, 100) == pytest.approx(120)  # three times as much
    assert most(300) == most(300, 250) == pytest.approx(900)  # nobody could use the rest


def processes(word: str) -> list[str]:
    """The command lines of processes that have this word."""
    lines = list[str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_text(errors="replace"))
    return [line for line in lines if word in line]


def test_a_job_that_takes_no_signal_is_killed_with_all_that_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in sessions of their own, as a tuner's are, held the GPU of the next job."""
    word = f"left{os.getpid()}"
    child = [sys.executable, "-c", "import time; time.sleep(600)", word]
    code = (
        "import pathlib, signal, subprocess, sys, time\n"
        "for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    signal.signal(one, signal.SIG_IGN)\n"
        f"subprocess.Popen({child}, start_new_session=True)\n"
        "print('begun')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_jobs.run_gpu_tests, "GRACE", 0.1)
    leaves = f"import subprocess; subprocess.Popen({child}, start_new_session=True)"
    jobs = [job("hangs", code, seconds=0.8), job("leaves", leaves), job("last", "print(1)")]
    assert run(jobs, tmp_path).failed
    printed = capsys.readouterr().out
    assert "hangs: exit -9 (stopped: it took too long) on GPU 7" in printed
    assert "leaves: exit 0 on GPU 7" in printed and "last: exit 0" in printed
    assert (tmp_path / "hangs.log").read_text() == "begun\n", "what was printed is there"
    assert not processes(word)


def test_a_job_that_prints_without_end_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_jobs, "LARGEST", 1 << 20)
    jobs = [job("prints", "while True: print('x' * 9999)"), job("last", "")]
    assert run(jobs, tmp_path).failed
    printed = capsys.readouterr().out
    assert "(stopped: it printed 1 MiB) on GPU 7" in printed and "last: exit 0" in printed
    assert len(printed) < 2000


def test_a_job_that_cannot_be_run_is_told_and_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.log").mkdir()
    assert run([job("odd", ""), job("last", "")], tmp_path).failed
    assert "odd: not run: IsADirectoryError" in (printed := capsys.readouterr().out)
    assert "last: exit 0" in printed
    assert (tmp_path / "jobs.txt").read_text() in printed.replace("\n  ", "\n")


@pytest.mark.parametrize(
    ("ending", "background"),
    [
        (signal.SIGTERM, True),
        (signal.SIGTERM, False),
        (signal.SIGKILL, False),
        (signal.SIGINT, False),
    ],
)
def test_results_are_whole_however_the_tool_ends(
    ending: signal.Signals, background: bool, tmp_path: Path
) -> None:
    """What is rented ends at its time. A shell's background commands have SIGINT ignored."""
    word = f"job{os.getpid()}"
    codes = {
        "first": "open('{out}/first.json', 'w').write('[1]'); print('done')",
        "second": f"import time; print('{word} begun'); time.sleep(600)",
        "third": "",
    }
    jobs = [job(name, code, 100).model_dump() for name, code in codes.items()]
    (tmp_path / "jobs.yaml").write_text(json.dumps(jobs))
    out, archive = tmp_path / "out", tmp_path / "results.tar.gz"
    options = ["--out", out, "--archive", archive, "--seconds", "1000"]
    command = [sys.executable, ROOT / "tools/gpu_jobs.py", tmp_path / "jobs.yaml", *options]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.SIG_DFL)
    tool = subprocess.Popen(
        [os.fspath(one) for one in command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, handler)
    log, until = out / "second.log", time.monotonic() + 120
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    assert log.read_text() == f"{word} begun\n", "it is there before the job ends"
    begun = (out / "jobs.txt").read_text()
    assert "first: exit 0 on GPU 0" in begun and "second: running on GPU 0, 300 s" in begun
    tool.send_signal(ending)
    try:
        printed, _ = tool.communicate(timeout=120)
    finally:
        tool.kill()
    assert tool.returncode != 0
    with tarfile.open(archive) as packed:
        assert {"first.json", "first.log", "jobs.txt"} <= {*packed.getnames()}
        assert packed.extractfile("first.json").read() == b"[1]"  # type: ignore[union-attr]
    until = time.monotonic() + 60
    while processes(word) and time.monotonic() < until:  # the kernel ends it, of a killed tool
        time.sleep(0.05)
    assert not processes(word)
    if ending != signal.SIGKILL:
        last = printed[printed.rindex("\nfirst: exit 0") :]
        assert "second: exit" in last and "(stopped: the time is over)" in last
        assert last.endswith("third: not begun, needs 100 s\n")
        assert "second: exit" in (out / "jobs.txt").read_text()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[{name: a, command: b}]", "seconds"),
        ("[{name: a/b, command: b, seconds: 1}]", "name"),
        ("[{name: a, command: b, seconds: 1, cells: c}]", "cells"),
        ("a: [", "no list of jobs"),
        ('[{name: a, command: "sh -c \'echo", seconds: 1}]', "No closing quotation"),
        ("[{name: a, command: '', seconds: 1}]", "must name a program"),
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
    program, *words = shlex.split(one.command.replace("{seed}", "1"))

    def here(cases: list[Any], asked: object) -> None:
        raise _Reached if cases else AssertionError("no case")

    monkeypatch.setattr(runner, "Here", here)
    if program == "python":
        monkeypatch.syspath_prepend(str((ROOT / words[0]).parent))
        command = importlib.import_module(Path(words[0]).stem).main
        assert command.make_context(words[0], words[1:])
    elif words[0] == "bench" and "--shapes" not in words:
        with pytest.raises(_Reached):
            main(words, standalone_mode=False)
    elif words[0] == "tune":  # the whole of it goes through its problems first, for ten seconds
        command = main.get_command(click.Context(main, **main.context_settings), "tune")
        assert command is not None and command.make_context("tune", words[1:]).params["path"]
    else:
        done = CliRunner().invoke(main, words)
        assert "no GPU" in done.output, done.output

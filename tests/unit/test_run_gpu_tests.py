"""GPU tests are shared out over GPUs, and a run that is stopped or fails says so."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import gpu_records
import pytest
import run_gpu_tests
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]


def test_every_file_is_in_one_list_and_lists_are_of_one_size() -> None:
    files = run_gpu_tests.files_of(())
    assert len(files) > 40
    known = run_gpu_tests.records(ROOT / "tests")
    lists = run_gpu_tests.lists(files, known)
    assert sorted(file for one in lists for file in one) == files
    took = run_gpu_tests.durations(files, known)
    sizes = [sum(took[file] for file in one) for one in lists]
    assert len(lists) > 5
    for one, size in zip(lists, sizes, strict=True):
        assert size <= run_gpu_tests.LIST or len(one) == 1


def test_a_file_is_as_long_as_its_record_says() -> None:
    """A list of quick tests took 190 s, one with fewer that wait for other programs 445 s."""
    known = {"gpu": {"tests": {"test_one.py": {"passed": 3, "skipped": 0, "seconds": 200}}}}
    files = ["tests/gpu/test_one.py", "tests/gpu/test_two.py"]
    assert run_gpu_tests.durations(files, known) == dict(
        zip(files, (200, run_gpu_tests.UNKNOWN), strict=True)
    )


def test_a_path_without_gpu_tests_is_refused() -> None:
    """A run of nothing passed."""
    with pytest.raises(click.BadParameter, match=r"there is no .*tests/families/gem"):
        run_gpu_tests.files_of(["tests/families/gem"])
    with pytest.raises(click.BadParameter, match=r"there is no GPU test in .*tests/unit"):
        run_gpu_tests.files_of(["tests/gpu", "tests/unit"])


def test_files_are_missing_without_a_record_of_this_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tests/gpu"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text('{"digest": "old", "tests": {"test_one.py": {}}}')
    monkeypatch.setattr(gpu_records, "digest", lambda subject, root: "old")
    files = ["tests/gpu/test_one.py", "tests/gpu/test_two.py"]
    assert run_gpu_tests.missing(files, tmp_path / "tests", tmp_path) == files[1:]
    monkeypatch.setattr(gpu_records, "digest", lambda subject, root: "new")
    assert run_gpu_tests.missing(files, tmp_path / "tests", tmp_path) == files
    monkeypatch.setattr(run_gpu_tests, "missing", lambda *_: [])
    done = CliRunner().invoke(run_gpu_tests.main, ["--missing", "tests/gpu"])
    assert done.exit_code == 0 and "nothing is run" in done.output


def test_a_record_that_was_cut_off_is_none(tmp_path: Path) -> None:
    """A machine whose time ended while it was written left no run of tests a chance."""
    for text in ('{"digest": "x", "tes', "", "[]"):
        (folder := tmp_path / "gpu").mkdir(exist_ok=True)
        (folder / "record.json").write_text(text)
        known = run_gpu_tests.records(tmp_path)
        assert known["gpu"] == run_gpu_tests.records(ROOT / "tests")["gpu"]
    (folder / "record.json").write_text('{"digest": "x", "tests": {}}')
    assert run_gpu_tests.records(tmp_path)["gpu"]["digest"] == "x"


ARGUMENTS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")


def started(folder: Path, tests: dict[str, str], seconds: float = 600) -> run_gpu_tests.Run:
    """Return a run of a list for each of these files of tests, by their texts."""
    for name, text in tests.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    end = time.monotonic() + seconds
    return run_gpu_tests.Run([[name] for name in tests], ARGUMENTS, folder, end, folder)


def test_each_gpu_has_a_pytest_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each waits for the other's file: lists that ran one after another would never end."""
    text = """
import os, pathlib, time
def test_both():
    pathlib.Path(f"gpu{os.environ['CUDA_VISIBLE_DEVICES']}").touch()
    while len(list(pathlib.Path().glob("gpu?"))) < 2:
        time.sleep(0.01)
"""
    run = started(tmp_path, {"test_a.py": text, "test_b.py": text})
    run.on_all("01")
    assert not run.failed
    assert capsys.readouterr().out.count("1 passed") == 2


def test_a_failure_and_lists_that_were_not_run_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(tmp_path, {"test_a.py": "def test_one():\n    assert False, 'wrong'\n"})
    run.on("0")
    assert run.failed
    assert "FAILED test_a.py::test_one - AssertionError: wrong" in capsys.readouterr().out
    run = started(tmp_path, {"test_b.py": "def test_one(): pass\n"}, seconds=-1)
    run.on("0")
    assert run.failed
    assert "list 0: not begun, since the time is over: test_b.py" in capsys.readouterr().out


@pytest.mark.parametrize("ignored", [False, True])
def test_a_list_is_interrupted_when_the_time_is_over(
    ignored: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was finished is told by a pytest that ends by itself: one that a shell began in the
    background, whose children have SIGINT ignored, was killed with all that it knew.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    text = """
import pathlib, time
def test_quick(): pass
def test_slow():
    pathlib.Path("begun").touch()
    time.sleep(3600)
"""
    run = started(tmp_path, {"test_a.py": text})
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run.on, "0")
        while not (tmp_path / "begun").exists():
            assert not done.done(), "the list ended before its second test began"
            time.sleep(0.05)
        run.end = 0.0
        done.result()
    if ignored:
        signal.signal(signal.SIGINT, handler)
    assert run.failed
    assert "1 passed" in capsys.readouterr().out


def test_an_interrupt_begins_no_further_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ended the list that ran, and all others were run before the command ended."""
    text = "def test_one(): pass\n"
    run = started(tmp_path, {"test_a.py": text, "test_b.py": text})
    begun = threading.Barrier(2)

    def on(gpu: str) -> None:
        begun.wait(600)
        if gpu == "0":
            raise KeyboardInterrupt
        until = time.monotonic() + 600
        while run.end and time.monotonic() < until:  # the interrupt is heard of
            time.sleep(0.01)
        run_gpu_tests.Run.on(run, gpu)

    monkeypatch.setattr(run, "on", on)
    with pytest.raises(KeyboardInterrupt):
        run.on_all("01")
    assert capsys.readouterr().out.count("not begun") == 2

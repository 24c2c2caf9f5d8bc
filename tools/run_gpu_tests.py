"""Runs GPU tests with a pytest for each GPU, and records what passed: `run_gpu_tests.py [PATHS]`.

Files are shared out in lists by how long their records say that they took, so that little is lost
where the time ends: one pytest over several GPUs ran 12 tests a second where one for each of two
ran 30 and 9. What passed is noted when a list ends; a list that is stopped has the files noted that
were finished. `make gpu-test` calls it.
"""

# ruff: noqa: S603 (what the user asks for)

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import click

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

import gpu_records  # noqa: E402
import share_gpus  # noqa: E402

LIST = 1_500  # seconds of one process after which a list is full: 16 need two minutes
UNKNOWN = 60  # seconds that a file without a record is taken to need
# What becomes the command: one that was begun in the background has SIGINT ignored, by which it is
# ended, and one whose tool was killed would hold its GPU.
BEGIN = """
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print(f"{sys.argv[1]}: {error.strerror}", flush=True)
    os._exit(127)
"""
HANGS = 300  # seconds after which a test hangs: the longest, of mutants, take one or two minutes
GRACE = 45  # seconds in which an interrupted pytest writes what passed
GONE = 10  # seconds in which what is killed is gone, unless a driver holds it
MARK = "SUPERVISED_BY"  # of the environment of a command, and of all that it begins


def files_of(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the files of GPU tests under these paths of the repository; without paths, all."""
    chosen = [root / path for path in paths] or [
        root / "tests" / one for one in gpu_records.places()
    ]
    if absent := [str(path) for path in chosen if not path.exists()]:
        raise click.BadParameter(
            f"there is no {', '.join(absent)}: name files or folders of tests."
        )
    found: set[str] = set()
    for path in chosen:
        files = [path] if path.is_file() else path.rglob("test_*.py")
        ours = {file.relative_to(root).as_posix() for file in files if file.parent.name == "gpu"}
        if not ours:
            raise click.BadParameter(
                f"there is no GPU test in {path}: name files of a folder gpu, or what such are in."
            )
        found |= ours
    return sorted(found)


def records(folder: Path, root: Path = ROOT) -> dict[str, Any]:
    """Return the record of each place in `folder`, or the repository's where that has none."""
    found = {place: gpu_records.latest(place, folder, root) for place in gpu_records.places(root)}
    return {place: record for place, record in found.items() if record}


def missing(files: Sequence[str], folder: Path, root: Path = ROOT) -> list[str]:
    """Return those of the files that no GPU has passed on this code."""
    held = {
        f"tests/{place}/{name}"
        for place, record in records(folder, root).items()
        if record["digest"] == gpu_records.digest(gpu_records.places(root)[place], root)
        for name in record["tests"]
    }
    return [file for file in files if file not in held]


def durations(files: Sequence[str], known: Mapping[str, Any]) -> dict[str, float]:
    """Return how long each file keeps one process busy, by the records `known`."""
    took = {
        f"tests/{place}/{name}": float(count.get("seconds", count["passed"]))
        for place, record in known.items()
        for name, count in record["tests"].items()
    }
    return {file: took.get(file, UNKNOWN) for file in files}


def lists(files: Sequence[str], known: Mapping[str, Any]) -> list[list[str]]:
    """Share files out in lists of about LIST seconds, by the records `known`; long files first."""
    sizes = durations(files, known)
    shared: list[list[str]] = []
    held: list[float] = []
    for file in sorted(files, key=lambda file: (-sizes[file], file)):
        room = (index for index, size in enumerate(held) if size + sizes[file] <= LIST)
        index = next(room, len(held))
        if index == len(held):
            shared.append([])
            held.append(0.0)
        shared[index].append(file)
        held[index] += sizes[file]
    return shared


def supervised(
    command: Sequence[str],
    log: Path,
    end: Callable[[], float],
    *,
    cwd: Path,
    env: Mapping[str, str],
) -> int:
    """Run a command that prints into `log`, until time.monotonic() is `end()`; its exit status.

    One that runs longer is interrupted, as Ctrl-C does, and killed GRACE seconds later. Whatever
    it began and left is killed when it has ended: that would hold the GPU.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-IS", "-c", BEGIN, *command],
            cwd=cwd,
            env={**env, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None and time.monotonic() < end():
                time.sleep(0.1)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(GRACE)
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                return process.wait(GONE)
            return -signal.SIGKILL  # its driver holds it
        finally:
            until = time.monotonic() + GONE
            while _killed(f"{MARK}={mark}".encode()) and time.monotonic() < until:
                time.sleep(0.01)


def _killed(mark: bytes) -> bool:
    """Kill the processes whose environment has this, and say whether there was one: some begin a
    session or a group of processes of their own, so that neither tells of all.
    """
    found = False
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
                found = True
    return found


def environment(gpu: str) -> dict[str, str]:
    """Return the variables of a command that sees one GPU, and this checkout; `""`: all that are.

    What it prints is in its file at once, whatever ends it.
    """
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Take SIGTERM, as `timeout` sends it, for Ctrl-C: commands are ended, and results written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Run:
    """Lists of files that several GPUs run, each taking the next one, until the time ends."""

    def __init__(
        self,
        work: Sequence[list[str]],
        arguments: Sequence[str],
        logs: Path,
        end: float,
        root: Path = ROOT,
    ) -> None:
        """Run `work` in `root` with these arguments of pytest until time.monotonic() is `end`."""
        self.root = root
        self.arguments = list(arguments)
        self.logs = logs
        self.end = end
        self.failed = False
        self.waiting: SimpleQueue[tuple[int, list[str]]] = SimpleQueue()
        for entry in enumerate(work):
            self.waiting.put(entry)

    def on_all(self, gpus: Sequence[str]) -> None:
        """Run all lists, as many at a time as there are GPUs; Ctrl-C ends those that run."""
        with ThreadPoolExecutor(len(gpus)) as pool:
            try:
                list(pool.map(self.on, gpus))
            except BaseException:
                self.end = 0.0
                raise

    def on(self, gpu: str) -> None:
        """Run list after list on one GPU."""
        while True:
            try:
                number, files = self.waiting.get_nowait()
            except Empty:
                return
            if time.monotonic() > self.end:
                self.failed = True
                click.echo(f"list {number}: not begun, since the time is over: {' '.join(files)}")
            else:
                self._run(number, files, gpu)

    def _run(self, number: int, files: Sequence[str], gpu: str) -> None:
        begun = time.monotonic()
        log = self.logs / f"list{number}.log"
        command = [sys.executable, "-m", "pytest", *self.arguments, *files]
        command += [f"--basetemp={self.logs / f'temporary{number}'}"]
        status = supervised(command, log, lambda: self.end, cwd=self.root, env=environment(gpu))
        if status != 0:  # never |=: another thread might have set it meanwhile
            self.failed = True
        lines = log.read_text(errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        last = lines[-1].strip("= ") if lines else "pytest printed nothing"
        seconds = time.monotonic() - begun
        click.echo(
            "\n  ".join([f"list {number} on GPU {gpu}, {seconds:.0f} s: {last} ({log})", *told])
        )


@click.command()
@click.argument("paths", nargs=-1)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    default=ROOT / "tests",
    help="The folder, laid out like tests/, where records are written.",
)
@click.option(
    "--missing", "only_missing", is_flag=True, help="Only files that no record holds for."
)
@click.option(
    "--workers", type=int, help="Processes a GPU (default: its share of CPUs, at most 16)."
)
@click.option("--seconds", type=float, default=float("inf"), help="When to stop and write records.")
def main(
    paths: tuple[str, ...], record: Path, only_missing: bool, workers: int | None, seconds: float
) -> None:
    """Run the GPU tests of PATHS (default: all) with one pytest for each visible GPU.

    The exit status is 1 where a test failed or was not run.
    """
    end = time.monotonic() + seconds
    record = record.resolve()  # each pytest begins in another folder
    files = files_of(paths)
    if only_missing:
        files = missing(files, record)
        if not files:
            click.echo("a record holds for each of these files: nothing is run")
            return
    gpus = share_gpus.visible() or [""]
    workers = workers or max(1, min(16, len(os.sched_getaffinity(0)) // len(gpus)))
    folder = ROOT / "build" / "gpu_tests"
    folder.mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="run_", dir=folder))  # several runs share a checkout
    arguments = ["-q", "-m", "gpu", "-n", str(workers), "--dist", "loadgroup"]
    arguments += ["-p", "no:cacheprovider", "-o", f"faulthandler_timeout={HANGS}"]
    arguments += ["--store", str(folder / "store"), "--record", str(record)]
    run = Run(lists(files, records(record)), arguments, logs, end)
    with interrupted_by_sigterm():
        run.on_all(gpus)
    sys.exit(run.failed)


if __name__ == "__main__":
    main()

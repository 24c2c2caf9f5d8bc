"""Runs commands that each need a GPU, one a GPU at a time: `gpu_jobs.py JOBS.yaml --seconds 500`.

For GPUs that are at hand for a limited time. JOBS.yaml is a list of jobs, the most wanted first:

    - name: cast_groups
      command: warploom bench cast --cells groups --json {out}/cast_groups.json
      seconds: 60

Each GPU takes the first job left whose `seconds` the time that is left allows. {out} is the folder
of results, where a job's output is NAME.log, and what became of each job is in jobs.txt; {seed} is
a number that is drawn when the job begins, for `warploom bench gemm --problems {seed}:60`. A job
that takes three times its seconds is stopped, and sooner where others wait: it may take half of the
time that is left, or a quarter more than its seconds. `--archive FILE` has all results in one file,
new after each job, for machines from which few files come back.
"""

from __future__ import annotations

import secrets
import shlex
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

import click
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

import run_gpu_tests  # noqa: E402
import share_gpus  # noqa: E402

LATE = 3.0  # times a job's seconds after which it is stopped
SLACK = 1.25  # times its seconds that it may take in any case
SHARE = 0.5  # of the time left, which it may take although others wait
LINES, WIDTH = 3, 200  # of a job's output that are shown
LARGEST = 64 << 20  # bytes of output after which a job is stopped, and of files in an archive


class Job(BaseModel):
    """A command, and the seconds that it is expected to take."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[\w.-]+$")
    command: str
    seconds: float = Field(gt=0)

    @field_validator("command")
    @classmethod
    def _has_words(cls, command: str) -> str:
        if not shlex.split(command):
            raise ValueError("must name a program")
        return command


def load(path: Path) -> list[Job]:
    """Read the jobs of a file. click.BadParameter names what is no job, and names used twice."""
    try:
        jobs = TypeAdapter(list[Job]).validate_python(yaml.safe_load(path.read_text()))
    except (yaml.YAMLError, ValueError) as error:  # of pydantic, and of bytes that are no text
        raise click.BadParameter(f"{path} is no list of jobs: {error}") from error
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.BadParameter(f"{path} has several jobs named {', '.join(twice)}")
    return jobs


class Queue:
    """Jobs that several GPUs work off until time.monotonic() is `end`."""

    def __init__(
        self, jobs: Sequence[Job], out: Path, end: float, archive: Path | None = None
    ) -> None:
        self.left, self.out, self.end, self.archive = list(jobs), out, end, archive
        self.became = {job.name: f"not begun, needs {job.seconds:.0f} s" for job in jobs}
        self.failed = False
        self._lock = Lock()

    def next(self) -> tuple[Job, float] | None:
        """Take the first job that can be finished in time; it, and the seconds that it may take.

        One that hangs leaves time for those that wait.
        """
        with self._lock:
            remaining = self.end - time.monotonic()
            job = next((job for job in self.left if job.seconds <= remaining), None)
            if job is None:
                return None
            self.left.remove(job)
            most = LATE * job.seconds
            if any(other.seconds <= remaining - job.seconds for other in self.left):
                most = min(most, max(SLACK * job.seconds, SHARE * remaining))
            return job, most

    def on_all(self, gpus: Sequence[str]) -> None:
        """Work on all GPUs at a time; Ctrl-C ends the jobs that run, and begins no other."""
        with ThreadPoolExecutor(len(gpus)) as pool:
            try:
                list(pool.map(self.work_on, gpus))
            except BaseException:
                self.end = 0.0
                raise

    def work_on(self, gpu: str) -> None:
        """Run job after job on one GPU."""
        while (taken := self.next()) is not None:
            job, most = taken
            begun, lines = time.monotonic(), list[str]()
            self._note(job, f"running on GPU {gpu}, {most:.0f} s at most")
            try:
                how, lines = self._run(job, gpu, begun + most)
            except Exception as error:  # such as a folder that is gone: the others are run
                how = f"not run: {error!r}"
            took = f"{time.monotonic() - begun:.0f} s (expected {job.seconds:.0f})"
            self._note(job, f"{how} on GPU {gpu}, {took}", lines, failed=how != "exit 0")

    def _run(self, job: Job, gpu: str, late: float) -> tuple[str, list[str]]:
        """Run a job that is stopped when it is `late`; what became of it, and its last lines."""
        log = self.out / f"{job.name}.log"
        named = job.command.replace("{seed}", str(secrets.randbelow(1_000_000)))
        words = [word.replace("{out}", str(self.out)) for word in shlex.split(named)]
        if words[0] in ("python", "warploom"):  # those of this environment
            module = [] if words[0] == "python" else ["-m", "warploom"]
            words[:1] = [sys.executable, *module]
        why = ""

        def end() -> float:
            """When it is to stop: a number that is over where it prints without end."""
            nonlocal why
            if log.stat().st_size > LARGEST:
                why = f" (stopped: it printed {LARGEST >> 20} MiB)"
                return 0.0
            first = min(late, self.end)
            if time.monotonic() >= first:
                why = f" (stopped: {'it took too long' if late <= first else 'the time is over'})"
            return first

        environment = run_gpu_tests.environment(gpu)
        status = run_gpu_tests.supervised(words, log, end, cwd=ROOT, env=environment)
        with log.open("rb") as printed:  # its end: what prints much may print more than there is
            printed.seek(max(0, log.stat().st_size - LINES * WIDTH * 4))
            last = printed.read().decode(errors="replace").splitlines()[-LINES:]
        return f"exit {status}{why}", [line[-WIDTH:] for line in last]

    def _note(
        self, job: Job, what: str, lines: Sequence[str] | None = None, *, failed: bool = False
    ) -> None:
        """Keep what becomes of a job; when it has ended, print that and renew the archive."""
        with self._lock:
            self.failed |= failed
            self.became[job.name] = what
            with suppress(OSError):  # the disk is full, and jobs may go on
                (self.out / ".jobs.tmp").write_text("\n".join(self.told()) + "\n")
                (self.out / ".jobs.tmp").replace(self.out / "jobs.txt")
            if lines is None:
                return
            with suppress(OSError, UnicodeError):  # nobody reads, or cannot read this
                click.echo("\n  ".join([f"{job.name}: {what}", *lines]))
            if self.archive is not None:
                with suppress(OSError):
                    pack(self.out, self.archive)

    def told(self) -> list[str]:
        """A line for each job: what became of it."""
        return [f"{name}: {what}" for name, what in self.became.items()]


def pack(folder: Path, archive: Path) -> None:
    """Put the files of a folder into an archive, which is whole at every moment.

    Files of more than LARGEST bytes are left.
    """
    written = archive.with_name(f".{archive.name}.tmp")
    with tarfile.open(written, "w:gz") as packed:
        for path in sorted(folder.rglob("*")):
            with suppress(FileNotFoundError):  # temporary files of jobs that run
                size = path.stat().st_size
                if path.is_file() and size <= LARGEST and path not in (written, archive):
                    packed.add(path, path.relative_to(folder).as_posix())
    written.replace(archive)


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "build/jobs"
)
@click.option(
    "--seconds",
    type=float,
    default=float("inf"),
    help=f"When to stop: jobs that run have {run_gpu_tests.GRACE} s then to end by themselves.",
)
@click.option(
    "--archive",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A .tar.gz of all results, new after each job.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Only these jobs.")
def main(
    path: Path, out: Path, seconds: float, archive: Path | None, only: tuple[str, ...]
) -> None:
    """Run the jobs of PATH on all visible GPUs.

    The exit status is 1 where a job failed, was stopped or was not begun.
    """
    end = time.monotonic() + seconds
    jobs = load(path)
    if unknown := sorted({*only} - {job.name for job in jobs}):
        raise click.BadParameter(f"{path} has no job named {', '.join(unknown)}")
    out.mkdir(parents=True, exist_ok=True)
    chosen = [job for job in jobs if not only or job.name in only]
    queue = Queue(chosen, out.resolve(), end, archive and archive.resolve())
    try:
        with run_gpu_tests.interrupted_by_sigterm():
            queue.on_all(share_gpus.visible() or [""])
    finally:
        with suppress(OSError):
            click.echo("\n".join(["", *queue.told()]))  # of what is printed, the end may come back
    sys.exit(queue.failed or bool(queue.left))


if __name__ == "__main__":
    main()

"""Runs commands that each need a GPU, one a GPU at a time: `gpu_jobs.py JOBS.yaml --seconds 500`.

For GPUs that are at hand for a limited time. JOBS.yaml is a list of jobs, the most wanted first:

    - name: cast_groups
      command: warploom bench cast --cells groups --json {out}/cast_groups.json
      seconds: 60

Each GPU takes the first job left whose `seconds` the time that is left allows. {out} is the folder
of results, where a job's output is NAME.log; a job that takes three times its seconds is stopped.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import click
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

import run_gpu_tests  # noqa: E402
import share_gpus  # noqa: E402

LATE = 3.0  # times a job's seconds after which it is stopped
LINES = 3  # of a job's output that are shown


class Job(BaseModel):
    """A command, and the seconds that it is expected to take."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[\w.-]+$")
    command: str
    seconds: float = Field(gt=0)


def load(path: Path) -> list[Job]:
    """Read the jobs of a file. click.BadParameter names what is no job, and names used twice."""
    try:
        jobs = TypeAdapter(list[Job]).validate_python(yaml.safe_load(path.read_text()))
    except (yaml.YAMLError, ValidationError) as error:
        raise click.BadParameter(f"{path} is no list of jobs: {error}") from error
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.BadParameter(f"{path} has several jobs named {', '.join(twice)}")
    return jobs


class Queue:
    """Jobs that several GPUs work off until time.monotonic() is `end`."""

    def __init__(self, jobs: list[Job], out: Path, end: float) -> None:
        self.left, self.out, self.end = list(jobs), out, end
        self.failed = False
        self._lock = Lock()

    def next(self) -> Job | None:
        """Take the first job that can be finished in time."""
        with self._lock:
            remaining = self.end - time.monotonic()
            job = next((job for job in self.left if job.seconds <= remaining), None)
            if job is not None:
                self.left.remove(job)
            return job

    def work_on(self, gpu: str) -> None:
        """Run job after job on one GPU."""
        while (job := self.next()) is not None:
            self._run(job, gpu)

    def _run(self, job: Job, gpu: str) -> None:
        begun, log = time.monotonic(), self.out / f"{job.name}.log"
        end = min(begun + LATE * job.seconds, self.end)
        words = [word.replace("{out}", str(self.out)) for word in shlex.split(job.command)]
        if words[0] in ("python", "warploom"):  # those of this environment
            words[:1] = (
                [sys.executable] if words[0] == "python" else [sys.executable, "-m", words[0]]
            )
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        try:
            status = run_gpu_tests.supervised(words, log, lambda: end, cwd=ROOT, env=environment)
        except OSError as error:
            status = 127
            log.write_text(f"{error}\n")
        if status != 0:  # never |=: another thread might have set it meanwhile
            self.failed = True
        took = time.monotonic() - begun
        lines = log.read_text(errors="replace").splitlines()[-LINES:]
        summary = (
            f"{job.name} on GPU {gpu}, {took:.0f} s (expected {job.seconds:.0f}): exit {status}"
        )
        click.echo("\n  ".join([summary, *lines]))


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "build/jobs"
)
@click.option("--seconds", type=float, default=float("inf"), help="When to stop.")
@click.option("--only", multiple=True, metavar="NAME", help="Only these jobs.")
def main(path: Path, out: Path, seconds: float, only: tuple[str, ...]) -> None:
    """Run the jobs of PATH on all visible GPUs.

    The exit status is 1 where a job failed, was stopped or was not begun.
    """
    end = time.monotonic() + seconds
    jobs = load(path)
    if unknown := sorted({*only} - {job.name for job in jobs}):
        raise click.BadParameter(f"{path} has no job named {', '.join(unknown)}")
    out.mkdir(parents=True, exist_ok=True)
    queue = Queue([job for job in jobs if not only or job.name in only], out.resolve(), end)
    gpus = share_gpus.visible() or [""]
    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(queue.work_on, gpus))
    for job in queue.left:
        click.echo(f"{job.name}: not begun, since it needs {job.seconds:.0f} s")
    sys.exit(queue.failed or bool(queue.left))


if __name__ == "__main__":
    main()

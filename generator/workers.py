"""Compiling in child processes: NVRTC may crash there, and no CUDA context goes along.

A worker is a fresh interpreter that serves one JSON line a kernel. It is not multiprocessing's:
that would run the caller's main module again in every child, and one crash would fail them all.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Self, TypeVar, cast

from warploom.errors import CompilationError
from warploom.generator import nvrtc
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.toolchain import find

T = TypeVar("T")

COMMAND = [sys.executable, "-P", "-m", __name__]  # what a worker runs


class Worker:
    """A process that compiles; started on first use, and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compile(self, source: str, *, name: str, arch: str) -> Artifact:
        """Compile as `nvrtc.compile` does; a crash is a CompilationError too."""
        process = self._process = self._process or _start()
        requests, replies = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        with suppress(BrokenPipeError):  # where it died before it read the whole request
            requests.write(json.dumps({"source": source, "name": name, "arch": arch}) + "\n")
            requests.flush()
        reply = replies.readline()
        if not reply.endswith("\n"):
            self.stop()
            log = f"error: the compiling process ended with {_ending(process.returncode)}"
            raise CompilationError(name, log=log, source=source)
        fields = json.loads(reply)
        if "log" in fields:
            raise CompilationError(name, log=fields["log"], source=source)
        return _artifact(fields)

    def stop(self) -> None:
        """End the process, which must be idle."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


class WorkerPool:
    """`jobs` workers, each given one task at a time."""

    def __init__(self, jobs: int) -> None:
        self._workers = [Worker() for _ in range(jobs)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(jobs)

    def submit(self, task: Callable[[Worker], T]) -> Future[T]:
        """Run `task` in a thread of this process with a worker of its own."""
        return self._threads.submit(self._run, task)

    def _run(self, task: Callable[[Worker], T]) -> T:
        worker = self._idle.get()
        try:
            return task(worker)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()


def _start() -> subprocess.Popen[str]:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return subprocess.Popen(  # noqa: S603 (a constant)
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": path},
    )


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _artifact(fields: dict[str, Any]) -> Artifact:
    return Artifact(
        **fields
        | {
            "cubin": base64.b64decode(fields["cubin"]),
            "options": tuple(fields["options"]),
            "resources": {
                entry: Resources(**values) for entry, values in fields["resources"].items()
            },
            "warnings": tuple(fields["warnings"]),
        }
    )


def _serve() -> None:
    """Answer requests until standard input ends; what else is printed goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in requests:
        try:
            artifact = nvrtc.compile(**json.loads(line), toolchain=find())
        except CompilationError as error:
            reply = {"log": error.log}
        else:
            reply = asdict(artifact) | {"cubin": base64.b64encode(artifact.cubin).decode()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve()

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Timer
from typing import IO, Any, Protocol, Self, TypeVar, cast

from warploom.errors import CompilationError, ToolchainError
from warploom.generator import nvrtc
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.toolchain import find

T = TypeVar("T")

COMMAND = [sys.executable, "-P", "-m", __name__]  # what a worker runs
END = "\n"  # in place of a request: the last. A forked child of the caller may keep the pipe open.
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # which others send
ENDING = 60.0  # seconds for a process to end that has closed its output
LIMIT_SECONDS = 600.0  # for one kernel: the slowest take a minute on a busy machine


class Worker:
    """A process that compiles; started on first use, and again after a crash.

    `more` says that it will compile more than one kernel, and saves time then.
    """

    def __init__(self, *, more: bool = False) -> None:
        self._more = more
        self._process: subprocess.Popen[str] | None = None

    def compile(self, source: str, *, name: str, arch: str) -> Artifact:
        """Compile as `nvrtc.compile` does; a crash or a hang is a CompilationError too."""
        request = {"source": source, "name": name, "arch": arch, "more": self._more}
        reply, late = self._ask(request)
        fields = {} if late else _fields(reply)
        if "artifact" in fields:
            return _artifact(fields["artifact"])
        if "toolchain" in fields:
            raise ToolchainError(**fields["toolchain"])
        if log := fields.get("log"):
            raise CompilationError(name, log=log, source=source)
        ended, lost = self._end(reply, late=late)
        log = f"error: the compiling process {ended}"
        raise CompilationError(name, log=log, source=source, lost=lost)

    def abandon(self) -> None:
        """Do nothing: a kernel takes seconds, and is in the store then."""

    def stop(self) -> None:
        """End the process, which must be idle."""
        process, self._process = self._process, None
        if process is not None:
            requests = cast("IO[str]", process.stdin)
            with suppress(OSError):  # it has ended by itself
                requests.write(END)
                requests.flush()
            process.communicate()

    def _ask(self, request: dict[str, object]) -> tuple[str, bool]:
        """Return the line that the process replies, and whether it was killed for taking long."""
        process = self._process = self._process or _start()
        requests, replies = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        late = Event()

        def expire() -> None:
            late.set()
            process.kill()

        limit = Timer(LIMIT_SECONDS, expire)
        limit.start()
        try:
            with suppress(BrokenPipeError):  # where it died before it read the whole request
                requests.write(json.dumps(request) + "\n")
                requests.flush()
            reply = replies.readline()
        finally:
            limit.cancel()
            limit.join()  # it may be killing the process, which then compiles nothing further
        return reply, late.is_set()

    def _end(self, reply: str, *, late: bool) -> tuple[str, bool]:
        """Put away a process that gave no good reply; return what became of it.

        And whether it was ended from outside, as where memory runs out: its kernel may be sound.
        """
        process = cast("subprocess.Popen[str]", self._process)
        self._process = None
        if reply.endswith("\n"):
            process.kill()
        try:
            process.communicate(timeout=ENDING)
        except subprocess.TimeoutExpired:  # it has closed its output, and does not end
            process.kill()
            process.communicate()
            return f"ended with {ending(process.returncode)}", False
        if late:
            return f"was stopped after {LIMIT_SECONDS:g} s", False
        if reply.endswith("\n"):
            return f"gave no reply but {reply[:80]!r}", False
        return f"ended with {ending(process.returncode)}", -process.returncode in KILLS


class Compiling(Protocol):
    """What compiles: a process of this machine, or what stands for one elsewhere."""

    def compile(self, source: str, *, name: str, arch: str) -> Artifact:
        """Compile as `nvrtc.compile` does."""
        ...

    def abandon(self) -> None:
        """Be told that nobody wants what it compiles, before `stop`; it need not do anything."""
        ...

    def stop(self) -> None:
        """End it; it is idle."""
        ...


class WorkerPool:
    """`jobs` workers, each given one task at a time; `more` than one, if that is known."""

    def __init__(
        self, jobs: int, *, more: bool = False, worker: Callable[..., Compiling] = Worker
    ) -> None:
        self._workers = [worker(more=more) for _ in range(jobs)]
        self._idle: SimpleQueue[Compiling] = SimpleQueue()
        for one in self._workers:
            self._idle.put(one)
        self._threads = ThreadPoolExecutor(jobs)

    def submit(self, task: Callable[[Compiling], T]) -> Future[T]:
        """Run `task` in a thread of this process with a worker of its own."""
        return self._threads.submit(self._run, task)

    def _run(self, task: Callable[[Compiling], T]) -> T:
        worker = self._idle.get()
        try:
            return task(worker)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.abandon()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()


def ending(code: int) -> str:
    """Say how a process ended, by its code as subprocess has it: negative for a signal."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 (a constant)
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path())},
    )


def search_path() -> list[str]:
    """Where this process finds modules; the working directory, which is `''` there, by its name."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # it was deleted: nothing is found there
        return list(filter(None, sys.path))
    return [entry or here for entry in sys.path]


def _fields(reply: str) -> dict[str, Any]:
    """Return what a whole reply says; nothing of one that is cut short or is none."""
    try:
        fields = json.loads(reply) if reply.endswith("\n") else None
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {}


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
    """Answer requests until the last; what else is printed goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in until_last(requests):
        replies.write(json.dumps(_reply(line)) + "\n")
        replies.flush()


def until_last(requests: Iterable[str]) -> Iterator[str]:
    """The lines of requests, until `END` or until there is nobody to send any."""
    return takewhile(lambda line: line != END, requests)


def _reply(request: str) -> dict[str, object]:
    try:
        artifact = nvrtc.compile(**json.loads(request), toolchain=find())
    except CompilationError as error:
        return {"log": error.log}
    except ToolchainError as error:
        return {"toolchain": {"value": error.value, "rule": error.rule, "fix": error.fix}}
    cubin = base64.b64encode(artifact.cubin).decode()
    return {"artifact": asdict(artifact) | {"cubin": cubin}}


if __name__ == "__main__":
    _serve()

"""The process that compiles candidates, as the process whose calls are tuned sees it.

It is started with the first request and ended with the last answer, so that nothing waits idle.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Lock, Thread
from typing import IO, Any, cast

from warploom.generator.launches import DeviceLimits
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation
from warploom.generator.workers import END, ending, search_path

COMMAND = (sys.executable, "-P", "-m", "warploom.tuning.autotune.preparing")
MOST = 4  # kernels that are compiled at a time

Reply = Mapping[str, Any]


def jobs() -> int:
    """How many kernels are compiled at a time: a quarter of the cores, and few."""
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // 4))


class Helper:
    """Requests by number; `answer` is called with each reply, in a thread of this.

    `jobs` is how many kernels the next process compiles at a time; 0: as many as `jobs()`.

    A reply has the number, and `compiling`, how many kernels there are, or `built`, the names of
    those that can be measured, or `failed`, why there are none.
    """

    def __init__(self, answer: Callable[[Reply], None], command: Sequence[str] = COMMAND) -> None:
        self._answer, self._command, self.jobs = answer, tuple(command), 0
        self._process: subprocess.Popen[str] | None = None
        self._open: set[int] = set()
        self._lock = Lock()  # guards which process there is, and what it was asked
        self._numbers = itertools.count(1)

    def find(
        self, operation: Operation, shape: Shape, target: DeviceLimits, first: Sequence[KernelSpec]
    ) -> int:
        """Ask for the candidates of a problem, and those that come first; the request's number."""
        return self._ask(
            kernels=[spec.name for spec in first],
            operation=asdict(operation),
            shape=asdict(shape),
            target=asdict(target),
        )

    def build(self, specs: Sequence[KernelSpec]) -> int:
        """Ask for these kernels; the request's number."""
        return self._ask(kernels=[spec.name for spec in specs])

    def done(self, number: int) -> None:
        """Take note that a request was answered; without another one, the process ends."""
        with self._lock:
            self._open.discard(number)
            idle = not self._open
        if idle:
            self.close()

    def close(self) -> None:
        """Let the process end."""
        with self._lock:
            process, self._process = self._process, None
            self._open.clear()
        if process is not None:
            stdin = cast("IO[str]", process.stdin)
            with suppress(OSError):  # it has ended by itself
                stdin.write(END)
                stdin.close()

    def _ask(self, **request: Any) -> int:
        number = next(self._numbers)
        with self._lock:  # a process whose death was told of is asked nothing: nobody would answer
            process = self._process = self._process or self._start()
            self._open.add(number)
        with suppress(OSError):  # where it has died, its missing answer tells
            stdin = cast("IO[str]", process.stdin)
            stdin.write(json.dumps({"number": number, **request}) + "\n")
            stdin.flush()
        return number

    def _start(self) -> subprocess.Popen[str]:
        apart = {"WARPLOOM_AUTOTUNE", "WARPLOOM_LOG"}
        environment = {name: value for name, value in os.environ.items() if name not in apart}
        process = subprocess.Popen(  # noqa: S603 (a constant, or a test's)
            (*self._command, str(self.jobs or jobs())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment | {"PYTHONPATH": os.pathsep.join(search_path())},
            start_new_session=True,  # Ctrl-C is the program's to handle
        )
        Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        answered: set[int] = set()
        with suppress(ValueError, OSError):
            for line in cast("IO[str]", process.stdout):
                reply = json.loads(line)
                if "compiling" not in reply:
                    answered.add(reply["number"])
                self._answer(reply)
        told = f"the process that compiles ended with {ending(process.wait())}"
        with self._lock:
            if self._process is not process:  # it was closed
                return
            self._process, missing = None, self._open - answered
            self._open -= missing
        for number in sorted(missing):
            self._answer({"number": number, "failed": told})

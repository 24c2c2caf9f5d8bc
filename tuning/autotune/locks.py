"""One process tunes a problem of a GPU kind, the others read its record: a lock file for each."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from warploom.generator.gpus import file_name
from warploom.generator.held_file import hold
from warploom.generator.records import problem_key
from warploom.generator.records_file import folder
from warploom.generator.shapes import Shape
from warploom.generator.specification import Operation


class ProblemLock:
    """The right to tune a problem, which the system takes back from a process that has ended."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def release(self) -> None:
        """Let others have it."""
        with suppress(OSError):
            self._path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Leave it to the process that this one was forked from, which would keep it for ever."""
        os.close(self._descriptor)


def take(gpu: str, operation: Operation, shape: Shape) -> ProblemLock | None:
    """Take the lock of a problem; None where another process has it. OSError as files have it."""
    told = "\n".join([gpu, *problem_key(operation, shape)])
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    path = folder() / "autotune" / f"{Path(file_name(gpu)).stem}_{digest}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return ProblemLock(path, hold(path, timeout=0))
    except TimeoutError:
        return None

"""The user's records of a GPU kind, read again when other processes wrote them, and written."""

from __future__ import annotations

import logging

from warploom.errors import RecordsError
from warploom.generator import records_file
from warploom.generator.records import Record
from warploom.runtime.records import environment, known, learn, user_file
from warploom.tuning.autotune.problem import Problem
from warploom.tuning.problems import runnable

logger = logging.getLogger(__name__)


class Keeping:
    """What this process knows of the files; one thread uses it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}  # how the file of a GPU kind last looked
        self._warned = False

    def recorded(self, problem: Problem) -> bool:
        """Whether there is a record that calls run by now, this process's or another's."""
        gpu, name = problem.target.gpu, problem.operation.family
        self._read(gpu)
        here = environment(problem.target, name)
        found = known(gpu).records.exact(problem.operation, problem.shape, here)
        return found is not None and runnable(found, here)

    def keep(self, gpu: str, record: Record) -> None:
        """Add a record to the file, and decide by it. RecordsError where it cannot be written."""
        learn(gpu, [records_file.keep(user_file(gpu), gpu, record)])

    def unwritable(self, error: Exception) -> str:
        """Tell once that records cannot be kept; what to say of each problem."""
        if not self._warned:
            self._warned = True
            logger.warning("autotune: nothing is tuned, since records cannot be kept: %s", error)
        return "records cannot be kept"

    def _read(self, gpu: str) -> None:
        path = user_file(gpu)
        try:
            status = path.stat()
            now = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._seen.get(gpu) != now:
                self._seen[gpu] = now
                learn(gpu, records_file.known(path, gpu))
        except (OSError, RecordsError):
            return  # writing will tell

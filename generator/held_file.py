"""A file that one process at a time writes: the lock is on itself, and nothing lies beside it."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from warploom.errors import RecordsError
from warploom.generator import json_file

_PAUSE = 0.01  # seconds between two attempts


def hold(path: Path, timeout: float, *, make: bool = True) -> int:
    """Open the regular file at `path` and hold it until the descriptor is closed.

    What is written is appended. A file that another put in its place meanwhile is held instead.
    With `make`, a file is made if it is missing; without, that is a FileNotFoundError. TimeoutError
    where another process holds it for longer than `timeout` seconds; OSError else.
    """
    until = time.monotonic() + timeout
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    while True:
        descriptor = os.open(path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("must be a regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # in use, or removed since it was opened
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() >= until:
            raise TimeoutError("in use")
        time.sleep(_PAUSE)


def unwritable(path: Path, error: OSError, fix: str) -> RecordsError:
    """Return the RecordsError for a file that could not be written."""
    return RecordsError(f"{path}: cannot be written", rule=json_file.reason(error), fix=fix)

"""What threads of a process share: locks that a forked child has anew, and maps with a bound.

Another thread of the child's parent may have held a lock, for ever.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TypeVar


def fork_lock() -> threading.Lock:
    """A lock of a module, used as a context, that a forked child has unlocked.

    Made once, at import: fork handlers cannot be taken back. What it guards must be whole between
    any two statements, since a fork may come at any of them.
    """
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


Key = TypeVar("Key")
Value = TypeVar("Value")

_lock = fork_lock()


def remember(known: dict[Key, Value], key: Key, value: Value, bound: int) -> None:
    """Keep `value` in a map of at most `bound` entries; the oldest go first."""
    with _lock:
        while len(known) >= bound:
            with suppress(StopIteration, RuntimeError):  # another thread forgets what is known
                known.pop(next(iter(known)), None)
        known[key] = value

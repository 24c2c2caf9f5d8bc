"""Locks that a forked child has anew: another thread of its parent may have held one, for ever."""

from __future__ import annotations

import os
import threading


class ForkLock:
    """A lock of a module, used as a context.

    Made once, at import: fork handlers cannot be taken back. What it guards must be whole between
    any two statements, since a fork may come at any of them.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

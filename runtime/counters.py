"""Public counters of what the runtime did: tests and `explain` read them."""

from __future__ import annotations

import itertools

from warploom.generator import build
from warploom.generator.locks import fork_lock

_LOCKED = ("loads", "plans", "copies")


class Counters:
    """Counts since the process started or `reset` was called, right for any number of threads.

    compiles and store_hits are of kernels built in this process, loads of cubins handed to the
    driver, plans of calls seen for the first time, copies of operands that TMA cannot read in
    place, launches of kernels.

    `next(launch_numbers)` counts one launch: it is a single call into C, which no other thread
    interrupts, and costs a warm call a tenth of what a lock would. Reading draws a number too.
    """

    def __init__(self) -> None:
        self.loads = self.plans = self.copies = 0
        self.launch_numbers = itertools.count()
        self._not_launches = 0  # numbers drawn by reading, and before the reset
        self._lock = fork_lock()

    def __repr__(self) -> str:
        """All counters by name."""
        counts = ", ".join(f"{name}={count}" for name, count in self.as_dict().items())
        return f"Counters({counts})"

    @property
    def compiles(self) -> int:
        """Kernels compiled; the generator counts them."""
        return build.counters.compiles

    @property
    def store_hits(self) -> int:
        """Kernels found stored; the generator counts them."""
        return build.counters.store_hits

    @property
    def launches(self) -> int:
        """Kernels launched."""
        with self._lock:
            launches = next(self.launch_numbers) - self._not_launches
            self._not_launches += 1
            return launches

    def add(self, name: str) -> None:
        """Add 1 to loads, plans or copies."""
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def reset(self) -> None:
        """Set all counters to 0."""
        with self._lock:
            for name in _LOCKED:
                setattr(self, name, 0)
            self._not_launches = next(self.launch_numbers) + 1
            build.counters.compiles = build.counters.store_hits = 0

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        names = ("compiles", "store_hits", *_LOCKED, "launches")
        return {name: getattr(self, name) for name in names}


counters = Counters()
launch_numbers = counters.launch_numbers  # by itself, as each warm call looks it up

"""Public counters of what the runtime did: tests and `explain` read them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields

from warploom.generator import build


@dataclass
class Counters:
    """Counts since the process started or `reset` was called.

    compiles and store_hits are of kernels built in this process, loads of cubins handed to the
    driver, plans of calls seen for the first time, copies of operands that TMA cannot read in
    place, launches of kernels (unlocked: threads that launch at once may lose counts).
    """

    loads: int = 0
    plans: int = 0
    copies: int = 0
    launches: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def compiles(self) -> int:
        """Kernels compiled; the generator counts them."""
        return build.counters.compiles

    @property
    def store_hits(self) -> int:
        """Kernels found stored; the generator counts them."""
        return build.counters.store_hits

    def add(self, name: str, count: int = 1) -> None:
        """Add to one counter, safely from any thread."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def reset(self) -> None:
        """Set all counters to 0."""
        with self._lock:
            for name in self._names():
                setattr(self, name, 0)
            build.counters.compiles = build.counters.store_hits = 0

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        return {name: getattr(self, name) for name in ("compiles", "store_hits", *self._names())}

    def _names(self) -> list[str]:
        return [counter.name for counter in fields(self) if not counter.name.startswith("_")]


counters = Counters()

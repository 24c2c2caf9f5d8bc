"""Public counters of what the runtime did: tests and `explain` read them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Counts since the process started or `reset` was called.

    compiles and store_hits are of kernels built in this process, loads of cubins handed to the
    driver, plans of calls seen for the first time, copies of operands that TMA cannot read in
    place, launches of kernels.
    """

    compiles: int = 0
    store_hits: int = 0
    loads: int = 0
    plans: int = 0
    copies: int = 0
    launches: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, count: int = 1) -> None:
        """Add to one counter, safely from any thread."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def reset(self) -> None:
        """Set all counters to 0."""
        with self._lock:
            for counter in fields(self):
                if not counter.name.startswith("_"):
                    setattr(self, counter.name, 0)

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}


counters = Counters()

"""Who has tuning active, and what threads that call leave to the one thread that decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from warploom.generator.locks import fork_lock

Act = Callable[[], None]


class Context(Protocol):
    """One `with warploom.autotune()`: its budget, and the calls that came meanwhile."""

    budget: float

    def note(self, plan: Any, target: Any) -> None:  # noqa: ANN401
        """Note a call of a plan."""
        ...


class Activity:
    """The contexts that are open, the thread that they need, and what waits for it.

    lock      guards the contexts, and states of problems that calling threads change
    contexts  those that are open; the last one decides the budget of a new problem
    """

    def __init__(self) -> None:
        self.lock = fork_lock()
        self.fresh()

    def fresh(self) -> None:
        """Nobody has it active, and there is no thread: at the beginning, and in a forked child."""
        self.contexts: list[Context] = []
        self._acts: SimpleQueue[Act] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._own = threading.local()
        self._unwritten = 0

    def begin(self, context: Context, serve: Callable[[SimpleQueue[Act]], None]) -> None:
        """Open a context, and `serve` in a thread; under the lock."""
        self.contexts.append(context)
        if self._thread is None:
            self._thread = threading.Thread(
                target=serve, args=(self._acts,), name="warploom.autotune", daemon=True
            )
            self._thread.start()

    def end(self, context: Context) -> bool:
        """Take back one `begin`; True if it was the last. Under the lock."""
        if context in self.contexts:
            self.contexts.remove(context)
        return not self.contexts

    def note(self, plan: Any, target: Any) -> bool:  # noqa: ANN401 (the runtime's)
        """Note a call of a plan in each open context; False where there is none."""
        contexts = list(self.contexts)
        for one in contexts:
            one.note(plan, target)
        return bool(contexts)

    def tell(self, act: Callable[..., None], *given: Any) -> None:
        """Leave something to the thread that decides."""
        self._acts.put(partial(act, *given))

    @property
    def busy(self) -> bool:
        """Whether this thread is measuring: its calls are the engine's own."""
        return getattr(self._own, "busy", False)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, this thread's calls are the engine's own."""
        self._own.busy = True
        try:
            yield
        finally:
            self._own.busy = False

    def owe(self, more: int) -> None:
        """Count what the end of the process waits for, such as records."""
        with self.lock:
            self._unwritten += more

    def finish(self, seconds: float) -> None:
        """Wait, at most so long, until nothing is owed."""
        until = time.monotonic() + seconds
        while self._unwritten and time.monotonic() < until:
            time.sleep(0.01)

"""The changes that `warploom.patch` makes to a model, so that an interrupted patch is undone."""

from __future__ import annotations

from collections.abc import Callable


class Journal:
    """What undoes each change of a model, recorded before the change is made.

    What is recorded puts back what was there: it may run where the change was not made yet, and
    more than once. So an interrupt between any two steps of Python leaves nothing unrecorded.
    """

    def __init__(self) -> None:
        self._undoing: list[Callable[[], object]] = []

    def before_change(self, undo: Callable[[], object]) -> None:
        """Record what undoes the change that follows."""
        self._undoing.append(undo)

    def undo(self) -> None:
        """Undo the changes, the last one first; a second call goes on where one was interrupted."""
        while self._undoing:
            self._undoing[-1]()
            self._undoing.pop()

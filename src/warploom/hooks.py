"""What is told of calls that are planned: nothing, unless `warploom.autotune` is active.

The runtime looks here and nowhere else, so that no call loads what tunes. It stands beside all
rooms, since a variable of the environment sets it before any of them is loaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Protocol


class Observer(Protocol):
    """Something that is told of plans; the types are the runtime's, which this does not import."""

    def planned(self, plan: Any) -> None:  # noqa: ANN401
        """Hear that a plan (runtime/plan.py) was made. It must not raise."""
        ...

    def told(self, choice: Any) -> str:  # noqa: ANN401
        """Say for `explain` how the tuning of a choice's problem stands; "" where there is none."""
        ...


class Nobody:
    """Hears of plans, and does nothing.

    It takes the place of an observer that has ended. None would not do: the runtime looks here
    twice for each plan, and another thread may be between the two.
    """

    def planned(self, plan: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    def told(self, choice: Any) -> str:  # noqa: ANN401
        """Return no text."""
        return ""


class _ByEnvironment(Nobody):
    """Begins what WARPLOOM_AUTOTUNE asks for with the first call that is planned."""

    def planned(self, plan: Any) -> None:  # noqa: ANN401
        import_module("warploom.tuning.autotune.api").by_environment()
        current = observer
        if current is not None and current is not self:
            current.planned(plan)


observer: Observer | None = _ByEnvironment() if os.environ.get("WARPLOOM_AUTOTUNE") else None

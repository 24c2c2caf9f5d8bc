"""`warploom.autotune`: what users switch on, and what it tells them."""

from __future__ import annotations

import math
from contextlib import ContextDecorator
from typing import Self

from warploom.errors import ConfigurationError
from warploom.runtime.tensors import shown
from warploom.tuning.autotune.engine import ENGINE
from warploom.tuning.autotune.report import Meetings, Report, Tuned
from warploom.variables import autotune_milliseconds, choice

MILLISECONDS = 50.0


def autotune(milliseconds: float = MILLISECONDS, *, jobs: int | None = None) -> Autotune:
    """Tune the shapes that calls meet while this is active, as a context manager or a decorator.

    The first calls of a shape without a tuned config run the kernel that they would run anyway,
    while other processes compile candidates. A later call measures the candidates, on operands of
    the tuner's own. The fastest is written to the user's tuning database of this GPU, and calls run
    it from then on, in this process and in others. This includes calls of existing plans, layers
    and compiled functions. A call during a capture measures nothing.

    Args:
        milliseconds: GPU time for measuring one shape, about.
        jobs: Kernels that are compiled at a time: by default one for every four cores, at most
            four.

    Returns:
        The context manager. `print(tuning.report)` after `with autotune() as tuning` says what
        became of each shape.

    Raises:
        ConfigurationError: For numbers that are not positive, and, when it becomes active, if
            WARPLOOM_RECORDS excludes tuned configs.

    Example:
        with warploom.autotune() as tuning:
            model(x)
        print(tuning.report)
    """
    number = isinstance(milliseconds, int | float) and not isinstance(milliseconds, bool)
    if not number or not 0 < milliseconds < math.inf:
        raise ConfigurationError(
            f"milliseconds {shown(milliseconds)}",
            rule="must be a number, more than 0: the GPU time for a new problem",
            fix=f"leave it out: {MILLISECONDS:g} is the default",
        )
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ConfigurationError(
            f"jobs {shown(jobs)}",
            rule="must be a whole number of processes, 1 or more",
            fix="leave it out: few are started, so that the program has the other cores",
        )
    return Autotune(milliseconds * 1e-3, jobs or 0)


class Autotune(ContextDecorator):
    """Tunes from `with` to its end, or while a decorated function runs; it may be nested."""

    def __init__(self, budget: float, jobs: int = 0) -> None:
        self._met, self._jobs = Meetings(budget), jobs

    def __enter__(self) -> Self:
        """Begin; ConfigurationError where records are left out."""
        if (use := choice("WARPLOOM_RECORDS")) != "use":
            raise ConfigurationError(
                f"WARPLOOM_RECORDS={use}",
                rule="must not be set: warploom.autotune writes tuned configs",
                fix="leave the variable out, or tune nothing",
            )
        ENGINE.enter(self._met, self._jobs)
        return self

    def __exit__(self, *exception: object) -> None:
        """End; what was measured is recorded all the same."""
        ENGINE.leave(self._met)

    @property
    def problems(self) -> list[Tuned]:
        """How the problems stand that are to be tuned, of those that were met, in order."""
        return ENGINE.problems(self._met)

    @property
    def report(self) -> Report:
        """What became of every problem whose calls came while this was active, also afterwards.

        Printed, it says how many there were of each outcome, and what each came to.
        """
        return ENGINE.report(self._met)


def by_environment() -> None:
    """Begin as WARPLOOM_AUTOTUNE says, for as long as the process runs."""
    milliseconds = autotune_milliseconds()
    if milliseconds:
        autotune(MILLISECONDS if milliseconds == 1 else milliseconds).__enter__()
    else:
        ENGINE.stay_off()

"""Samplers that take no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warploom.runtime.measure import Call, Sampler


def constant(seconds: float) -> Callable[[Sequence[Call]], Sampler]:
    """A sampler that makes every call once and takes `seconds`."""

    def sampler(calls: Sequence[Call]) -> Sampler:
        for call in calls:
            call()
        return lambda: seconds

    return sampler

"""Samplers that take no time, and contenders that are run without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warploom.runtime.contest import Contender
from warploom.runtime.measure import Call, Sampler


def constant(seconds: float) -> Callable[[Sequence[Call]], Sampler]:
    """A sampler that makes every call once and takes `seconds`."""

    def sampler(calls: Sequence[Call]) -> Sampler:
        for call in calls:
            call()
        return lambda: seconds

    return sampler


def assert_right(found: Sequence[Contender], names: Sequence[str], kernel: str) -> None:
    """Run the contenders of a case: these, ours first, which says what kernel it runs."""
    assert [one.name for one in found] == [*names]
    for one in found:
        one.calls[0]()
        assert one.error_share is None or one.error_share() <= 1, one.name
    assert found[0].told is not None and kernel in found[0].told()[0]

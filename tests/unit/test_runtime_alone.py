"""A single launch is timed as the GPU runs it, however slow the host is."""

from __future__ import annotations

import pytest

from warploom.runtime import alone as module
from warploom.runtime.measure import Call, Sampler


class Clock:
    """A GPU and its host, which takes `host` seconds to enqueue what the GPU has done in 5 us.

    What is enqueued runs one after the other; an event is past once the GPU came to it.
    """

    def __init__(self, host: float) -> None:
        self.host, self.now, self.busy = host, 0.0, 0.0

    def enqueue(self, seconds: float, host: float = 5e-6) -> None:
        self.now += host
        self.busy = max(self.busy, self.now) + seconds

    def call(self) -> None:
        self.enqueue(5e-6, self.host)

    def event(self, **_: object) -> Clock.Event:
        return Clock.Event(self)

    class Event:
        def __init__(self, clock: Clock) -> None:
            self.clock, self.at = clock, 0.0

        def record(self) -> None:
            self.clock.enqueue(0.0)
            self.at = self.clock.busy

        def query(self) -> bool:
            return self.at <= self.clock.now

        def synchronize(self) -> None:
            self.clock.now = max(self.clock.now, self.at)

        def elapsed_time(self, end: Clock.Event) -> float:
            return (end.at - self.at) * 1e3


def alone(clock: Clock, call: Call, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    monkeypatch.setattr(module.torch.cuda, "Event", clock.event)
    monkeypatch.setattr(module.torch.cuda, "_sleep", lambda n: clock.enqueue(n / 2e9))
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_flush", lambda _: lambda: clock.enqueue(6e-5))
    return module.alone([call])


@pytest.mark.parametrize("host", [1e-5, 2e-4, 3e-3])
def test_a_call_alone_is_not_charged_with_the_time_of_a_slow_host(
    host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers that take the host 100 us were timed as 100 us on a GPU that has them done in 10."""
    clock = Clock(host)
    sample = alone(clock, clock.call, monkeypatch)
    assert [sample() for _ in range(3)] == pytest.approx([5e-6] * 3, rel=0.01)


def test_a_call_that_waits_for_the_gpu_is_timed_with_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no pause in which the host would be first: it must not be looked for forever."""
    clock = Clock(1e-3)

    def waiting() -> None:
        clock.now = max(clock.now, clock.busy)
        clock.call()

    assert alone(clock, waiting, monkeypatch)() == pytest.approx(1e-3, rel=0.05)

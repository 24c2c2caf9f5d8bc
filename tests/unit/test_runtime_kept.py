"""Buffers that stay zeros: launches that may run at the same time never have the same."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from warploom.runtime import kept
from warploom.runtime.driver import PER_THREAD_STREAM

ERROR = 201  # CUDA_ERROR_INVALID_CONTEXT


@dataclass
class Driver:
    """Stands in for the driver: streams have ids, some are captured, a thread may be new to it."""

    ids: dict[int, int] = field(default_factory=lambda: {7: 17, 9: 19})
    capturing: set[int] = field(default_factory=set)  # handles
    entered: bool = True

    CUstream = staticmethod(lambda handle: handle)

    def cuStreamIsCapturing(self, handle: int) -> tuple[int, bool]:
        return (0, handle in self.capturing) if self.entered else (ERROR, False)

    def cuStreamGetId(self, handle: int) -> tuple[int, int]:
        return (900 if handle in self.capturing else 0), self.ids[handle]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    slabs = iter(range(1 << 20, 1 << 30, 1 << 20))

    def enter(device: int) -> None:
        made.entered = True

    def check(result: tuple[Any, ...]) -> object:
        assert not result[0]
        return result[1] if len(result) == 2 else result[1:]

    for name, value in {
        "driver": made,
        "enter": enter,
        "check": check,
        "_allocate": lambda device, size: next(slabs),
        "_found": {},
        "_slabs": {},
        "_own": threading.local(),
    }.items():
        monkeypatch.setattr(kept, name, value)
    return made


def in_thread(stream: int) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(kept.zeros(0, stream, 4)))
    thread.start()
    thread.join()
    return found[0]


def test_a_stream_has_its_own_and_keeps_it(driver: Driver) -> None:
    addresses = [kept.zeros(0, stream, 4) for stream in (7, 9, 0, 7, 9, 0)]
    assert addresses[:3] == addresses[3:]
    assert len(set(addresses)) == 3
    assert kept.zeros(1, 7, 4) not in addresses  # another device's memory
    assert in_thread(7) == addresses[0]


def test_a_handle_made_anew_is_another_stream(driver: Driver) -> None:
    """The kernels of the stream that had it before may still count."""
    before = kept.zeros(0, 7, 4)
    driver.ids[7] = 99
    assert kept.zeros(0, 7, 4) != before


def test_a_per_thread_default_stream_is_one_for_each_thread(driver: Driver) -> None:
    """Its handle is alike in all: half of what two threads computed was wrong."""
    driver.ids[PER_THREAD_STREAM] = 2
    own = kept.zeros(0, PER_THREAD_STREAM, 4)
    others = {in_thread(PER_THREAD_STREAM) for _ in range(3)}  # even if a thread's number returns
    assert len(others | {own}) == 4
    assert kept.zeros(0, PER_THREAD_STREAM, 4) == own


def test_every_captured_launch_has_its_own(driver: Driver) -> None:
    """A graph is replayed beside what the stream of its capture does next, and in branches."""
    eager = kept.zeros(0, 7, 4)
    driver.capturing = {7}
    captured = {kept.zeros(0, 7, 4) for _ in range(1100)}
    driver.capturing = set()
    assert len(captured | {eager}) == 1101
    assert kept.zeros(0, 7, 4) == eager


def test_a_thread_new_to_cuda_is_brought_in(driver: Driver) -> None:
    """Its first attention failed with CUDA_ERROR_INVALID_CONTEXT."""
    driver.entered = False
    assert kept.zeros(0, 7, 4)
    assert driver.entered


def test_buffers_are_lines_apart_and_grow(driver: Driver) -> None:
    small = kept.zeros(0, 7, 4), kept.zeros(0, 9, 4)
    assert abs(small[0] - small[1]) >= kept.LEAST
    large = kept.zeros(0, 7, 100_000)  # more than a slab
    assert large not in small
    assert kept.zeros(0, 7, 4) == kept.zeros(0, 7, 100_000) == large
    spans = sorted(kept._found.values())
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    assert all(address % kept.LEAST == 0 for address, _ in spans)


def test_memory_is_asked_of_the_driver_seldom(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(kept, "_allocate", lambda device, size: asked.append(size) or 1 << 20)
    driver.ids = {stream: stream for stream in range(3, 300)}
    for stream in driver.ids:
        kept.zeros(0, stream, 4)
    assert asked == [kept._SLAB]

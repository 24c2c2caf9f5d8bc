"""Buffers that stay zeros: launches that may run at the same time never have the same."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from warploom.errors import DeviceError
from warploom.runtime import kept
from warploom.runtime.driver import PER_THREAD_STREAM

ERROR = 201  # CUDA_ERROR_INVALID_CONTEXT


@dataclass
class Driver:
    """Stands in for the driver: streams have ids, some are captured, a thread may be new to it.

    A graph has the number of its capture. Those that are instantiated from one have references of
    their own, as clones do.
    """

    ids: dict[int, int] = field(default_factory=lambda: {7: 17, 9: 19})
    capturing: dict[int, int] = field(default_factory=dict)  # captures, by the stream's handle
    entered: bool = True
    refused: bool = False  # no graph takes a reference
    destroyed: dict[int, tuple[int, int]] = field(default_factory=dict)  # what is called, by object
    references: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    graphs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _objects: itertools.count[int] = field(default_factory=itertools.count)

    CUstream = staticmethod(lambda handle: handle)
    CUhostFn = staticmethod(lambda address: address)
    CUuserObject_flags = cuda.CUuserObject_flags
    CUuserObjectRetain_flags = cuda.CUuserObjectRetain_flags

    def cuStreamIsCapturing(self, handle: int) -> tuple[int, bool]:
        return (0, handle in self.capturing) if self.entered else (ERROR, False)

    def cuStreamGetCaptureInfo(self, handle: int) -> tuple[Any, ...]:
        capture = self.capturing[handle]
        return 0, 1, capture, capture, [], [], 0

    def cuUserObjectCreate(
        self, pointer: int, function: int, count: int, flags: int
    ) -> tuple[int, int]:
        assert count == flags == 1
        number = next(self._objects)
        self.destroyed[number], self.references[number] = (pointer, function), count
        return 0, number

    def cuGraphRetainUserObject(
        self, graph: int, number: int, count: int, flags: int
    ) -> tuple[int]:
        assert count == flags == 1  # the caller's reference becomes the graph's
        if self.refused:
            return (ERROR,)
        self.graphs[graph].append(number)
        return (0,)

    def cuUserObjectRelease(self, number: int, count: int) -> tuple[int]:
        self.references[number] -= count
        if not self.references[number]:
            pointer, function = self.destroyed.pop(number)
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(pointer)
        return (0,)

    def instantiate(self, graph: int, number: int) -> None:
        for one in self.graphs[graph]:
            self.references[one] += 1
            self.graphs[number].append(one)

    def destroy(self, graph: int) -> None:
        for one in self.graphs.pop(graph, []):
            self.cuUserObjectRelease(one, 1)

    def cuStreamGetId(self, handle: int) -> tuple[int, int]:
        return (900 if handle in self.capturing else 0), self.ids[handle]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    slabs = iter(range(1 << 20, 1 << 30, 1 << 20))

    def enter(device: int) -> None:
        made.entered = True

    def check(result: tuple[Any, ...]) -> object:
        if result[0]:
            raise DeviceError(f"status {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    for name, value in {
        "driver": made,
        "enter": enter,
        "check": check,
        "_allocate": lambda device, size: next(slabs),
        "_found": {},
        "_captured": {},
        "_lent": [],
        "_free": {},
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


def test_launches_of_a_stream_of_a_capture_share_what_no_other_has(driver: Driver) -> None:
    """Every captured launch had its own: a graph of 32 layers took a MiB that was never free."""
    eager = kept.zeros(0, 7, 4)
    driver.capturing = {7: 50, 9: 50}  # a graph of two branches
    branches = [{kept.zeros(0, stream, 4) for _ in range(1100)} for stream in (7, 9)]
    assert [len(one) for one in branches] == [1, 1]
    driver.capturing = {7: 51}
    other = kept.zeros(0, 7, 4)  # of a graph that may be replayed beside the first
    assert len({eager, *branches[0], *branches[1], other}) == 4
    assert kept.zeros(1, 7, 4) not in {eager, *branches[0], *branches[1], other}
    driver.capturing = {}
    assert kept.zeros(0, 7, 4) == eager


def test_what_a_graph_had_serves_others_when_it_is_gone(driver: Driver) -> None:
    """Not when its capture has ended: it may be replayed until what was instantiated of it ends."""
    found = []
    for graph in range(100, 400):
        driver.capturing = {7: graph, 9: graph}
        found.append({kept.zeros(0, stream, 4096) for stream in (7, 9)})
        driver.instantiate(graph, -graph)
        driver.destroy(graph)  # as torch does at the end of a capture
        driver.destroy(-graph + 2)  # of what came before the one before
    assert all(len(one) == 2 for one in found)
    assert all(one.isdisjoint(two) for one, two in pairwise(found))
    assert len(set.union(*found)) == 6
    assert len(kept._captured) == len(kept._lent) <= 6


def test_a_capture_that_needs_more_keeps_what_it_had_before(driver: Driver) -> None:
    """Launches that were captured before read it in every replay."""
    driver.capturing = {7: 50}
    small, large = kept.zeros(0, 7, 4), kept.zeros(0, 7, 100_000)
    assert kept.zeros(0, 7, 4) == large != small
    driver.capturing = {9: 51}
    assert kept.zeros(0, 9, 4) not in {small, large}
    driver.destroy(50)
    driver.capturing = {9: 52}
    assert [kept.zeros(0, 9, 4), kept.zeros(0, 9, 100_000)] == [small, large]


def test_threads_of_one_capture_share_nothing_on_their_default_streams(driver: Driver) -> None:
    driver.capturing = {PER_THREAD_STREAM: 50}
    own = kept.zeros(0, PER_THREAD_STREAM, 4)
    assert in_thread(PER_THREAD_STREAM) != own == kept.zeros(0, PER_THREAD_STREAM, 4)


def test_what_no_graph_took_is_not_lost(driver: Driver) -> None:
    driver.capturing, driver.refused = {7: 50}, True
    with pytest.raises(DeviceError):
        kept.zeros(0, 7, 4)
    driver.refused = False
    kept.zeros(0, 7, 4)
    assert len(kept._lent) == 1
    assert not any(kept._free.values())


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
    driver.capturing = {7: 50, 9: 50}
    kept.zeros(0, 7, 300), kept.zeros(0, 9, 4)
    lent = [(one.address, one.size) for _, one in kept._lent]
    spans = sorted([*kept._found.values(), *lent])
    assert len(spans) == 4
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
        if stream == 100:
            kept.zeros(0, 1, 100_000)
    assert asked == [kept._SLAB, 1 << 17]  # and what was left of the first was used

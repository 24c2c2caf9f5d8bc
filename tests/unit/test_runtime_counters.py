"""Counters lose nothing when threads count at once, and reading them changes nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from warploom.runtime import driver
from warploom.runtime import launch_plan as plans
from warploom.runtime.counters import Counters, counters
from warploom.runtime.launch_plan import LaunchPlan

THREADS, TIMES = 8, 5000


@pytest.fixture
def restless() -> Iterator[None]:
    """Let the interpreter change threads wherever it may."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[], object]) -> None:
    start = threading.Barrier(THREADS)

    def run() -> None:
        start.wait()
        for _ in range(TIMES):
            work()

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def warm_plan(launches: int) -> LaunchPlan:
    """A plan that has met the addresses () already, with launches that reach no driver."""
    prepared = tuple(SimpleNamespace(fire=lambda arguments: None) for _ in range(launches))
    plan = LaunchPlan(cast("Any", None), 0, (), (), (), (), cast("Any", None))
    plan._configured[0] = cast("Any", prepared)
    plans._bound[(plan._number, 0, 0, 0, (), ())] = bytearray(), 0
    return plan


@pytest.mark.usefixtures("restless")
def test_no_launch_is_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "current_stream", lambda device: 0)
    plan = warm_plan(2)
    before = counters.launches
    in_threads(lambda: plan.run((), (), lambda: None))
    assert counters.launches - before == 2 * THREADS * TIMES


@pytest.mark.usefixtures("restless")
def test_reading_while_others_count_changes_no_count() -> None:
    mine = Counters()

    def work() -> None:
        next(mine.launch_numbers)
        mine.add("copies")
        assert mine.launches <= THREADS * TIMES

    in_threads(work)
    assert (mine.launches, mine.copies) == (THREADS * TIMES, THREADS * TIMES)


def test_launches_start_again_from_0_however_often_they_were_read() -> None:
    mine = Counters()
    for count in (3, 0, 2):
        for _ in range(count):
            next(mine.launch_numbers)
        assert mine.launches == mine.launches == mine.as_dict()["launches"] == count
        assert f"launches={count}" in repr(mine)
        mine.reset()

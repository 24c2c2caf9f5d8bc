"""Threads and forks: nobody waits for a compilation that he does not need, or for a lost lock."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from warploom.generator import build, locks
from warploom.generator.build import counters as built
from warploom.runtime import kernel as kernels
from warploom.runtime.counters import counters
from warploom.runtime.kernel import Kernel


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has built nothing, and whose store nobody asks."""
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_building", {})
    monkeypatch.setattr(kernels, "store", lambda: None)


@pytest.mark.usefixtures("fresh")
def test_a_compilation_holds_up_neither_other_kernels_nor_loaded_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One lock for all let warm calls at new addresses wait for whole compilations."""
    begun, finish = threading.Event(), threading.Event()

    def compile(spec: str, store: object) -> object:
        if spec == "slow":
            begun.set()
            assert finish.wait(600)
        return SimpleNamespace(cubin=b"")

    monkeypatch.setattr(kernels.building, "build", compile)
    slow: Any = "slow"
    thread = threading.Thread(target=kernels.kernel, args=(slow,))
    thread.start()
    assert begun.wait(600)
    try:
        other: Any = kernels.kernel("quick")  # type: ignore[arg-type]
        other._handles["entry"] = "handle"
        other._ready.add(("entry", 0))
        assert other.load("entry", 0) == "handle"
    finally:
        finish.set()
        thread.join()


@pytest.mark.usefixtures("fresh")
def test_a_kernel_that_several_threads_want_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together, calls = threading.Barrier(4), []

    def compile(spec: str, store: object) -> object:
        calls.append(spec)
        return SimpleNamespace(cubin=b"")

    monkeypatch.setattr(kernels.building, "build", compile)
    found: list[Kernel] = []

    def ask() -> None:
        together.wait(600)
        found.append(kernels.kernel("wanted"))  # type: ignore[arg-type]

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["wanted"]
    assert len({id(kernel) for kernel in found}) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_what_another_thread_forgets_is_no_error_of_what_is_kept(begun: bool) -> None:
    """A call ended with a StopIteration or a RuntimeError where its plan was to be remembered."""

    class Forgotten(dict[int, str]):
        """A map that another thread clears before one looks for the oldest of it, or then."""

        def __iter__(self) -> Iterator[int]:
            if not begun:
                self.clear()
            found = super().__iter__()
            self.clear()
            return found

    known = Forgotten({1: "one", 2: "two"})
    locks.remember(known, 3, "three", 2)
    assert [*known.items()] == [(3, "three")]


@pytest.mark.parametrize(
    ("lock", "act"),
    [
        (counters._lock, lambda: counters.add("plans")),
        (locks._lock, lambda: locks.remember({}, (1,), 1, 4)),
        (build._counting, lambda: build._count("compiles")),
        (kernels._loading, kernels._loading.acquire),
    ],
    ids=["counters", "plans", "builds", "loads"],
)
def test_a_forked_child_does_not_wait_for_a_lock_of_its_parents_thread(
    lock: threading.Lock, act: Callable[[], None]
) -> None:
    """Workers of a data loader hung where another thread was just planning."""
    before = built.compiles
    with lock:  # as another thread of the parent would hold it
        child = os.fork()
        if not child:
            signal.alarm(600)  # ends the child where it hangs
            act()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert built.compiles == before

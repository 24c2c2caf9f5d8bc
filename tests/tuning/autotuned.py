"""A machine that is made up, on which calls are tuned: plans, a compiler and a GPU's times."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from warploom import hooks
from warploom.generator.launches import DeviceLimits
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, parse_name
from warploom.runtime.families.gemm.api import GemmPlan
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.measure import Timing
from warploom.tuning.autotune import course, engine, offers
from warploom.tuning.autotune.activity import Act
from warploom.tuning.autotune.candidates import candidates
from warploom.tuning.autotune.contest import Measured
from warploom.tuning.autotune.course import Course
from warploom.tuning.autotune.engine import Engine
from warploom.tuning.autotune.report import Meetings

GPU = DeviceLimits(132, "NVIDIA H200", "13.0")
READY = "waiting for a call outside a capture"


class FakeLaunch:
    """Launches that note whose they are."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.ran: list[KernelSpec] = []

    def run(self, *_: object) -> tuple[()]:
        self.ran.append(self.spec)
        return ()


def plan_of(m: int = 96, n: int = 640, k: int = 512, *, aligned: bool = True) -> GemmPlan:
    """A plan of a product, as a call makes it, whose launches only note that they ran."""
    a = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    b = torch.empty(n, k, dtype=torch.bfloat16, device="meta").t()
    out = None if aligned else torch.empty(m, n + 1, dtype=torch.bfloat16, device="meta")[:, :n]
    call = GemmCall(a, b, out=out)
    drafted = call.draft(GPU)
    launch: Any = FakeLaunch(drafted.choice.spec)
    plan = GemmPlan(("plan", m, n, k), drafted.choice, launch, (), drafted.details, 0, drafted)
    if hooks.observer is not None:
        hooks.observer.planned(plan)
    return plan


def call(plan: GemmPlan) -> KernelSpec:
    """Run a plan's launches once; the kernel that ran."""
    launch: Any = plan.launch
    real = getattr(launch, "real", launch)
    launch.run((), (), lambda: None)
    found: KernelSpec = real.ran[-1]
    return found


class FakeHelper:
    """Compiles at once, or when it is let, and remembers what it was asked."""

    def __init__(self, answer: Callable[[Any], None]) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []
        self.held, self.jobs = False, 0
        self.fails = ""

    def find(
        self,
        operation: Operation,
        shape: Shape,
        target: DeviceLimits,
        first: Sequence[KernelSpec],
    ) -> int:
        return self._ask([spec.name for spec in candidates(operation, shape, target, first)])

    def build(self, specs: Sequence[KernelSpec]) -> int:
        return self._ask([spec.name for spec in specs])

    def done(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _ask(self, names: list[str]) -> int:
        self.asked.append(names)
        number = len(self.asked)
        self.answer({"number": number, "compiling": len(names)})
        if not self.held:
            self.finish(number)
        return number

    def finish(self, number: int) -> None:
        if self.fails:
            self.answer({"number": number, "failed": self.fails})
        else:
            self.answer({"number": number, "built": self.asked[number - 1]})


class EndingCourse(Course):
    """A course whose thread ends where it is told to."""

    def serve(self, queue: SimpleQueue[Act]) -> None:
        with suppress(SystemExit):
            super().serve(queue)


class Machine:
    """An engine and what it runs on."""

    def __init__(self, patch: pytest.MonkeyPatch, *, poll: float = 0.01) -> None:
        self.measured: list[tuple[KernelSpec, ...]] = []
        self.rehearsed: list[tuple[Operation, int]] = []
        self.capturing = False
        self.during: Callable[[], None] = lambda: None
        self.pick: Callable[[KernelSpec, Sequence[KernelSpec]], KernelSpec] = self.best
        self.built: dict[KernelSpec, object] = {}
        self.helpers: list[FakeHelper] = []
        patch.setattr(engine.targets, "at_hand", lambda device: GPU)
        patch.setattr(course.kernels, "_kernels", self.built)
        patch.setattr(course, "fetched", self._fetched)
        patch.setattr(offers, "plan_launches", lambda spec, *_: FakeLaunch(spec))
        self.rehearse: Callable[[Operation, int], None] = lambda operation, device: (
            self.rehearsed.append((operation, device))
        )
        self.engine = Engine(
            lambda activity: EndingCourse(
                activity,
                self._measure,
                lambda device: not self.capturing,
                lambda operation, device: self.rehearse(operation, device),
                self._helper,  # type: ignore[arg-type]
                poll=poll,
            )
        )

    def enter(self, budget: float = 0.05, jobs: int = 0) -> Meetings:
        """Open a context, as `with warploom.autotune()` does."""
        context = Meetings(budget)
        self.engine.enter(context, jobs)
        return context

    def end(self) -> None:
        """End the thread that decides, which else would decide in the tests that come next.

        It writes records where they are looked for by then, and takes locks there.
        """
        thread = self.engine._activity._thread
        if thread is not None:
            self.engine._activity.tell(sys.exit)  # behind all that it was told before
            thread.join(600)
            assert not thread.is_alive(), "the thread that decides does not end"

    @property
    def helper(self) -> FakeHelper:
        return self.helpers[-1]

    @staticmethod
    def best(present: KernelSpec, specs: Sequence[KernelSpec]) -> KernelSpec:
        return next(spec for spec in specs if spec != present)

    def _helper(self, answer: Callable[[Any], None]) -> FakeHelper:
        self.helpers.append(FakeHelper(answer))
        return self.helpers[-1]

    def _fetched(self, names: Sequence[str]) -> list[KernelSpec]:
        specs = [parse_name(name) for name in names]
        self.built.update(dict.fromkeys(specs, object()))
        return specs

    def _measure(
        self,
        operation: object,
        shape: object,
        device: int,
        present: KernelSpec,
        kept: Sequence[KernelSpec],
        specs: Sequence[KernelSpec],
        budget: float,
    ) -> Measured:
        self.measured.append(tuple(specs))
        self.during()
        winner = self.pick(present, specs)
        times = {spec: Timing((2e-5, 2e-5, 2e-5)) for spec in specs}
        times[winner] = Timing((1e-5, 1e-5, 1e-5))
        return Measured(winner, times, 0.01, {})

    def status(self) -> str:
        return self.engine.problems()[0].status if self.engine.problems() else ""


def until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait until a condition holds, which another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it never came:\n{inspect.getsource(condition)}"
        time.sleep(0.002)

"""GPUs that die, hang, lie, are slow and come back, and runs on fleets of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

from sweeps import GPU, default_of, entries, environment

from warploom.errors import DeviceError
from warploom.generator.records import Record, Records
from warploom.generator.specification import KernelSpec
from warploom.tuning.account import Ended
from warploom.tuning.fleet.members import Fleet
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import About, Batch
from warploom.tuning.journal import Journal, Result
from warploom.tuning.problems import Problem
from warploom.tuning.replay import NoCompiler, Replay
from warploom.tuning.tuner import FINAL_PRECISION, Tuner

HERE = {"gemm": environment()}
KIND = About(GPU, 132)
Results = dict[KernelSpec, Result]
Lie = Callable[[Batch, Results], Results]


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake(Replay):
    """A sweep played back, with what real GPUs do.

    dies    the batches, counted from 1, at which it is lost
    lies    what it makes of its results; takes: how many times as long all of its times are
    """

    def __init__(
        self,
        listed: Sequence[Problem],
        *,
        dies: Sequence[int] = (),
        lies: Lie | None = None,
        takes: float = 1.0,
        condition: Condition | None = None,
        kind: About = KIND,
    ) -> None:
        super().__init__([entry for one in listed for entry in entries(one, roughness=0.03)])
        self.dies, self.lies, self.takes, self.kind = dies, lies, takes, kind
        self.says = condition or Condition("580.1")
        self.batches: list[Batch] = []
        self.closed = False

    @property
    def about(self) -> About:
        return self.kind

    def condition(self) -> Condition:
        return self.says

    def measure(self, batch: Batch) -> Results:
        self.batches.append(batch)
        if len(self.batches) in self.dies:
            raise DeviceError("the actor died", rule="as the test has it")
        found = super().measure(batch)
        for spec, one in found.items():
            if one.seconds:
                found[spec] = replace(one, seconds=one.seconds * self.takes)
        return self.lies(batch, found) if self.lies else found

    def close(self) -> None:
        self.closed = True


class Hanging(Fake):
    """One that gives no answer until it is closed; by a clock, that takes long."""

    def __init__(self, listed: Sequence[Problem], clock: Clock) -> None:
        super().__init__(listed)
        self.clock, self.ended = clock, Event()

    def measure(self, batch: Batch) -> Results:
        self.clock.now += 1000.0
        self.ended.wait(600)
        return super().measure(batch)  # which nobody waits for any more

    def close(self) -> None:
        super().close()
        self.ended.set()


def anchor_of(problem: Problem) -> Batch:
    return Batch(problem.operation, problem.shape, (default_of(problem),), FINAL_PRECISION, 8)


@dataclass
class Run:
    """How a run went: what ended, was saved, was said, and is in the journal."""

    ended: list[Ended] = field(default_factory=list)
    saved: list[Record] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    journal: list[Any] = field(default_factory=list)

    @property
    def picks(self) -> dict[Any, Any]:
        return {(one.operation, one.shape): one.best.schedule for one in self.saved}


def run(listed: Sequence[Problem], folder: Path, gpus: Mapping[str, Any], **options: Any) -> Run:
    """Tune problems on fakes, by name."""
    found, clock = Run(), options.pop("clock", Clock())
    fleet = Fleet(KIND, gpus, say=found.said.append, clock=clock, **options)
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    tuner = Tuner(
        *(listed, fleet, NoCompiler(), journal, Records(GPU), HERE),
        budget=1e6,
        save=found.saved.append,
        alarm=found.alarms.append,
        clock=clock,
    )
    try:
        found.ended = tuner.run()
    finally:
        journal.close()
        found.journal = journal.entries
    return found

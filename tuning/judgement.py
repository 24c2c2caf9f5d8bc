"""Holds a record against what the model would choose: an old pick, measured once more.

A record stays where nothing is clearly faster, so that judging twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warploom.generator.records import Record
from warploom.generator.specification import KernelSpec
from warploom.tuning.journal import Result
from warploom.tuning.search import Search

AHEAD = 0.02  # of the record's time, by which another must be faster
LIKELY = 4  # kernels that the model ranks first, which come beside the default and
RUNNERS_UP = 1  # of the record


class Judgement(Search):
    """One loop of the record's best, the default and a handful of others, and no search."""

    def __init__(self, record: Record, default: KernelSpec, others: Sequence[KernelSpec]) -> None:
        super().__init__(default, ())
        present = KernelSpec(default.arch, record.operation, record.best.schedule)
        self.record, self.present, self.stage = record, present, "final"
        self._listed = list(dict.fromkeys([default, present, *others]))

    @property
    def ahead(self) -> list[KernelSpec]:
        """What is compiled at once: all of it."""
        return self._listed

    def wanted(self, *, explore: bool = True) -> list[KernelSpec]:
        """What the loop has."""
        del explore
        return self._listed if self.stage == "final" else []

    def rivals(self, finals: Mapping[KernelSpec, Result]) -> list[KernelSpec]:
        """The record's best too: whoever wins does so over it."""
        found = super().rivals(finals)
        measured = self.present in finals and finals[self.present].outcome == "correct"
        return list(dict.fromkeys([*found, *([self.present] if measured else [])]))

    def winner(self) -> KernelSpec | None:
        """The record's best, unless it is no longer right or the fastest is clearly ahead."""
        found = {spec: one.relative or one.seconds for spec, one in self.contenders().items()}
        times = {spec: time for spec, time in found.items() if time}
        fastest = min(times, key=lambda spec: (times[spec], spec.canonical_json), default=None)
        if fastest and self.present in times:
            ahead = times[fastest] < (1 - AHEAD) * times[self.present]
            return fastest if ahead else self.present
        return fastest

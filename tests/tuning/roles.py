"""A sweep played back by actors, of which one is slow and one lies. Loads no torch: each starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from warploom.generator.specification import KernelSpec
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import Batch
from warploom.tuning.journal import Entry, Result
from warploom.tuning.replay import Replay

PACE = 0.1  # seconds that a batch takes, so that an actor can be lost in the middle of one
ROLES = {"slow": 1.05, "lying": 0.7}  # how many times as long everything takes, it says


class Role(Replay):
    """A GPU that takes the first role in a folder that nobody has taken, or is a good one."""

    def __init__(self, entries: Sequence[Entry], roles: Path | None = None) -> None:
        super().__init__(entries, pace=PACE)
        self._takes = _taken(roles) if roles else 1.0

    def condition(self) -> Condition:
        return Condition("580.1")

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        found = super().measure(batch)
        return {
            spec: replace(one, seconds=one.seconds * self._takes) if one.seconds else one
            for spec, one in found.items()
        }


def _taken(roles: Path) -> float:
    for name, takes in ROLES.items():
        try:
            (roles / name).mkdir()
        except FileExistsError:
            continue
        return takes
    return 1.0

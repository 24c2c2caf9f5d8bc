"""A sweep played back by actors, of which one is slow and one lies. Loads no torch: each starts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

from warploom.generator.specification import KernelSpec
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import About, Batch
from warploom.tuning.journal import Entry, Result
from warploom.tuning.replay import Replay

PACE = 0.1  # seconds that a batch takes, so that an actor can be lost in the middle of one
DOOMED = "doomed"  # what files are called of those that are about to be killed
ROLES = {"slow": 1.05, "lying": 0.7}  # how many times as long everything takes, it says


class Role(Replay):
    """A GPU that takes the first role in a folder that nobody has taken, or is a good one."""

    def __init__(self, entries: Sequence[Entry], roles: Path | None = None) -> None:
        super().__init__(entries)
        self._roles, self._takes = roles, _taken(roles) if roles else 1.0

    def condition(self) -> Condition:
        return Condition("580.1")

    def _wait(self) -> None:
        """Wait while somebody is about to be killed: in the middle of its work, whoever it is."""
        while self._roles and any(self._roles.glob(f"{DOOMED}*")):
            time.sleep(0.01)

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        self._wait()
        time.sleep(PACE)
        found = super().measure(batch)
        return {
            spec: replace(one, seconds=one.seconds * self._takes) if one.seconds else one
            for spec, one in found.items()
        }


class Cells(Role):
    """A GPU beside which there is what has these versions; one cell ends what measures it."""

    def __init__(
        self, entries: Sequence[Entry], roles: Path, versions: Mapping[str, str], fatal: str
    ) -> None:
        super().__init__(entries, roles)
        self._versions, self._fatal = versions, fatal

    @property
    def about(self) -> About:
        return replace(super().about, versions=tuple(self._versions.items()))

    def cell(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._wait()
        time.sleep(PACE)
        return {"ended": "SIGSEGV"} if self._fatal in asked["name"] else answer(asked["name"])


def doom(roles: Path, kill: Callable[[], object], seconds: float) -> None:
    """Kill an actor in a while; it is to be given its work at once, and does not end it before."""
    _, name = tempfile.mkstemp(prefix=DOOMED, dir=roles)

    def end() -> None:
        kill()
        Path(name).unlink()

    Timer(seconds, end).start()


def answer(name: str) -> dict[str, Any]:
    """What a process says of a product's cell."""
    extents = dict(zip("mnk", map(int, name.split()[-1].split("x")), strict=True))
    problem = {"family": "gemm", "cells": "squares", **extents, "type": name.split()[0]}
    entry = {"spread": 0.001, "kernel": None, "error_share": 0.5, "absent": None}
    entries = [
        {"contender": "warploom", "seconds": 1e-3, **entry},
        {"contender": "torch.mm", "seconds": 2e-3, **entry},
    ]
    floor = {"seconds": 1e-4, "limit": "bytes"}
    cell = {"name": name, "problem": problem, "entries": entries, "floor": floor}
    return {"cell": {**cell, "ratio": 2.0, "verdict": "won"}, "state": {"driver": "580.1"}}


def _taken(roles: Path) -> float:
    for name, takes in ROLES.items():
        try:
            (roles / name).mkdir()
        except FileExistsError:
            continue
        return takes
    return 1.0

"""The process that measures cells on a GPU of a cluster, wholly: all their contenders in turns.

It is the tuner's process, which batches of kernels are still given to, and knows cells as well: by
what was asked for, and their places in that. What fails at a cell ends it, with the reason.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks import machine, runner
from benchmarks.families import Asked, Case
from warploom.errors import DeviceError, ToolchainError
from warploom.generator.build import build_many
from warploom.generator.specification import parse_name
from warploom.generator.toolchain import find
from warploom.printable import first_line
from warploom.runtime.contest import Cell
from warploom.tuning import worker
from warploom.tuning.fleet.actor import SOURCES, digest
from warploom.tuning.worker import GpuLost

ROOT = Path(__file__).resolve().parents[1]
# What decides a cell: which there are, which kernels their calls run, and who competes.
ROOMS = (
    *("benchmarks", "configs", "generator", "integrations", "quantization"),
    *("runtime", "src", "templates", "tuning"),
)
OWN = ("benchmarks", "compiler")  # versions that are compared, and in no document


# ---- What is asked, and answered -----------------------------------------------------------------


def request(names: Sequence[str], asked: Asked, place: int, case: Case) -> dict[str, Any]:
    """What a process is told of a cell: the one at a place of all that were asked for."""
    plain = {one.name: getattr(asked, one.name) for one in fields(Asked)}
    del plain["baseline"], plain["before"]  # of no cell that a GPU measures there
    plain["specs"] = [spec.name for spec in asked.specs]
    return {"names": list(names), "asked": plain, "place": place, "name": case.name}


def code() -> str:
    """Digest of a checkout's code and of what decides its calls."""
    folders = [(room, ROOT / room) for room in ROOMS]
    decides = digest([("configs", ROOT / "configs")], [".json"])  # records, and the model
    return f"{digest(folders, (*SOURCES, '.yaml'))}-{decides}"


def versions() -> dict[str, str | int]:
    """What must be the same wherever cells of one run are measured."""
    found = machine.versions() | {"benchmarks": code()}
    with suppress(ToolchainError):
        found["compiler"] = find().identity[:16]
    return found


# ---- The process ---------------------------------------------------------------------------------


@dataclass
class Worker(worker.Worker):
    """Measures cells as well."""

    _known: str = field(default="", repr=False)
    _cases: list[Case] = field(default_factory=list, repr=False)
    _asked: Asked = field(default_factory=Asked, repr=False)

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What is said in answer to a request: a cell and the GPU's state, or of a batch."""
        if "cell" not in request:
            return super().reply(request)
        try:
            cell = self._cell(**request["cell"])
        except Exception as error:  # whatever a contender does, the next cell has a new process
            traceback.print_exc()
            raise GpuLost(first_line(error)) from error
        return {"cell": cell.as_json(), "state": machine.state()}

    def _cell(self, names: Sequence[str], asked: Mapping[str, Any], place: int, name: str) -> Cell:
        if (told := json.dumps([names, asked])) != self._known:
            self._asked = _restored(asked)
            build_many(self._asked.specs)  # one that does not compile is absent in its cells
            self._cases = list(runner.cases(runner.named(names), self._asked))
            self._known = told
        case = self._cases[place] if place < len(self._cases) else None
        if case is None or case.name != name:
            raise DeviceError(
                f"cell {name}",
                rule=f"is {case.name if case else 'none'} here: both must list the same",
                fix="have the same checkout on all nodes",
            )
        (cell,) = runner.measured([case], self._asked)
        return cell


def _restored(told: Mapping[str, Any]) -> Asked:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
    }
    return Asked(**given | {"specs": tuple(parse_name(name) for name in told["specs"])})


def serve() -> None:
    """Answer requests until standard input ends, as the tuner's process does."""
    worker.serve(Worker, lambda: {"versions": versions()})

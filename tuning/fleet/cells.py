"""Cells of benchmarks on the nodes of a cluster: the actor on a GPU, and the process behind it.

A cell is measured as a run on one host does it, all contenders in turns in one process, by the
checkout that the node has: its own kernels, compiled there, and its own peers. Which kernels calls
run is decided by the records of the command's machine.
"""

from __future__ import annotations

import os
import reprlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

from warploom.generator import json_file
from warploom.generator.records_file import folder
from warploom.generator.store import Store
from warploom.tuning.fleet.actor import Measurer
from warploom.tuning.gpu import Died, Gpu, GpuProcess

# benchmarks/ is in no path of modules: the command finds it beside the package
CODE = "from warploom.cli.bench import benchmarks; benchmarks()('worker').serve()"
COMMAND = (sys.executable, "-P", "-c", CODE)
LIMIT = 900.0  # seconds for a cell, with all that it compiles
DEATHS = 3  # in a row: then it is not the cells


class CellGpu(Gpu, Protocol):
    """A GPU on which cells of benchmarks can be measured, too."""

    def cell(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return what became of a cell, as JSON: it and the GPU's state, or why it `ended`."""
        ...


class CellProcess(GpuProcess):
    """A process that measures cells; started again when one of them ended it."""

    def __init__(self, visible: str, command: Sequence[str] = COMMAND, **limits: float) -> None:
        self._limit = limits.pop("cell", LIMIT)
        super().__init__(visible, command, **limits)

    def cell(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Have a cell measured: what the process answers, or why it `ended`.

        DeviceError where it ended at several cells, one after the other.
        """
        try:
            answer = self._answer(self._send({"cell": dict(asked)}))
        except Died as death:
            self._count(death, DEATHS)
            return {"ended": death.reason}
        self._deaths = 0
        return answer

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        match self._next(process, None, self._limit):
            case {"cell": dict(), "state": dict()} as answer:
                return cast("dict[str, Any]", answer)
            case {"illegal": str(reason)}:
                raise Died(None, "illegal", reason)
            case other:
                told = f"the measuring process said {reprlib.repr(other)}"
                raise Died(None, "illegal", told)


class CellMeasurer(Measurer):
    """An actor that has cells measured. Its node compiles, into the store that it has anyway."""

    def _opened(self, folder: Path) -> Store:
        os.environ["WARPLOOM_RECORDS_DIR"] = str(folder)
        return Store.default()

    def cell(self, number: str, asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Measure a cell, once, as `measure` does a batch."""
        return self._once(number, lambda: cast("CellGpu", self._gpu).cell(asked))


def cell_process(records: Mapping[str, bytes], ignored: str) -> Gpu:
    """The process that measures cells on the GPU that its actor was given; see `deciding`."""
    for name, content in records.items():
        (folder() / name).write_bytes(content)
    os.environ["WARPLOOM_RECORDS"] = ignored
    return CellProcess(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


def deciding() -> tuple[dict[str, bytes], str]:
    """This user's files of records, by name, and whether records are used: what decides calls.

    A file that cannot be read is left out, as by calls here; one that is damaged is so on nodes.
    """
    found = {}
    for path in folder().glob("*.json"):
        with suppress(OSError):
            found[path.name] = json_file.content(path)
    return found, os.environ.get("WARPLOOM_RECORDS", "")

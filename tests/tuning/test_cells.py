"""Cells of benchmarks that are measured elsewhere come back once, whatever becomes of who has them.

GPUs here answer at once; the processes speak the worker's protocol.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fleets import KIND, Fake
from roles import answer

from benchmarks import fleet, machine, runner, worker
from benchmarks.families import Asked, Case
from benchmarks.peers import gemm
from benchmarks.protocol import Record, read
from warploom.cli.engines import Engines
from warploom.errors import DeviceError
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.contest import Cell, Entry
from warploom.runtime.measure import Call
from warploom.tuning.fleet import cells
from warploom.tuning.fleet.cells import DEATHS, CellProcess
from warploom.tuning.fleet.members import FAILURES, Fleet
from warploom.tuning.problems import Problem
from warploom.tuning.replay import NoCompiler
from warploom.tuning.worker import GpuLost

NAMES, ASKED = ["gemm"], Asked(cells=("squares",), types=("bf16",))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = [(m, n, 128) for m in (32, 64, 128) for n in (64, 128)]
    monkeypatch.setitem(gemm.LISTED, "squares", squares)


def cases() -> list[Case]:
    return list(runner.cases(runner.named(NAMES), ASKED))


class Measures(Fake):
    """A GPU that answers for cells, and what becomes of some of them."""

    def __init__(self, *, lost: int = 0, fatal: str = "none", **options: Any) -> None:
        self.asked: list[str] = []
        self.lost, self.fatal = lost, fatal
        super().__init__(options.pop("listed"), **options)

    def cell(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(asked["name"])
        if len(self.asked) == self.lost:
            raise DeviceError("the actor died", rule="as the test has it")
        return {"ended": "SIGSEGV"} if self.fatal in asked["name"] else answer(asked["name"])


def measured(
    gpus: Mapping[str, Any], joining: Callable[[], Mapping[str, Any]] | None = None
) -> tuple[list[tuple[int, Cell]], list[str], fleet.Cells]:
    said: list[str] = []
    members = Fleet(KIND, gpus, joining=joining, failures=FAILURES, say=said.append)
    using = Engines(lambda: gpus or {"0": Fake([], kind=KIND)}, NoCompiler())
    cells = fleet.Cells(using, members, NAMES, ASKED, cases())
    return list(cells.measured()), said, cells


# ---- Where cells go ------------------------------------------------------------------------------


def test_every_cell_comes_back_once_though_gpus_are_lost(listed: list[Problem]) -> None:
    """A cell that was being measured is another GPU's; who failed twice is given none."""
    gpus = {name: Measures(listed=listed, lost=lost) for name, lost in (("a", 2), ("b", 0))}
    left = [Measures(listed=listed, lost=1), Measures(listed=listed)]

    def joining() -> dict[str, Measures]:
        return {"a": left.pop(0)} if left and gpus["a"].closed else {}

    found, said, cells = measured(gpus, joining)
    assert sorted(place for place, _ in found) == list(range(6))
    assert all(cell.name == cases()[place].name and cell.ratio == 2 for place, cell in found)
    assert all("its work goes to others" in one for one in said)
    if len(said) == 2:  # else the other GPU was faster
        assert "it is not used again" in said[1]
    assert {state["name"] for state in cells.states} <= {"a", "b"}


def test_a_cell_that_ends_two_processes_is_absent_with_the_reason(listed: list[Problem]) -> None:
    """Elsewhere first, since it may be the GPU; and no GPU is the worse for it."""
    fatal = cases()[0].name
    gpus = {name: Measures(listed=listed, fatal=fatal) for name in "ab"}
    found, said, _ = measured(gpus)
    (cell,) = (cell for _, cell in found if cell.name == fatal)
    assert len(found) == 6 and said == []
    assert (cell.entries[0].absent, cell.verdict) == ("SIGSEGV", "absent")
    assert [one.asked.count(fatal) for one in gpus.values()] == [1, 1]
    assert runner.exit_code([cell], allow_missing=True) == runner.MISSING
    alone, _, _ = measured({"a": Measures(listed=listed, fatal=fatal)})
    assert len(alone) == 6


def without_contenders(name: str) -> dict[str, Any]:
    told = answer(name)
    return {**told, "cell": {**told["cell"], "entries": []}}


def timed(name: str, seconds: object) -> dict[str, Any]:
    told = answer(name)
    told["cell"]["entries"][0]["seconds"] = seconds
    return told


GARBAGE: dict[str, Callable[[str], Any]] = {
    "None": lambda name: None,
    "a list": lambda name: [name],
    "no cell": lambda name: {"state": {}},
    "no state": lambda name: {"cell": answer(name)["cell"]},
    "another case": lambda name: answer("bf16 1x1x1"),
    "another field": lambda name: {"cell": {**answer(name)["cell"], "entries": [{"us": 1}]}},
    "no contenders": without_contenders,
    "a time of NaN": lambda name: timed(name, math.nan),
    "a time of 0": lambda name: timed(name, 0.0),
    "a time that is none": lambda name: timed(name, "fast"),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_answer_that_is_no_case_is_a_failure_of_its_gpu(
    garbage: str, listed: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run, or stood in the document."""
    gpus = {name: Measures(listed=listed) for name in ("bad", "good")}
    monkeypatch.setattr(gpus["bad"], "cell", lambda asked: GARBAGE[garbage](asked["name"]))
    found, said, _ = measured(gpus)
    assert [cell.name for _, cell in sorted(found, key=lambda one: one[0])] == [
        case.name for case in cases()
    ]
    assert all(cell.ratio == 2 for _, cell in found)
    assert all(one.startswith("GPU bad: ") for one in said) and gpus["bad"].closed


def test_who_stops_in_the_middle_ends_all_that_measures(listed: list[Problem]) -> None:
    gpus = {name: Measures(listed=listed) for name in "ab"}
    members = Fleet(KIND, gpus)
    running = fleet.Cells(
        Engines(lambda: gpus, NoCompiler()), members, NAMES, ASKED, cases()
    ).measured()
    next(running)
    running.close()  # as Ctrl-C does
    assert all(one.closed for one in gpus.values())


def test_one_with_other_versions_is_refused_and_names_the_first(listed: list[Problem]) -> None:
    """Its torch has other kernels, which would be the peer of some cells and not of others."""
    kinds = {
        "own": replace(KIND, versions=(("python", "3.12"), ("torch", "2.11"))),
        "other": replace(KIND, versions=(("python", "3.12"), ("torch", "2.12"))),
    }
    gpus = {name: Measures(listed=listed, kind=kind) for name, kind in kinds.items()}
    said: list[str] = []
    members = Fleet(kinds["own"], gpus, say=said.append)
    assert said == ["GPU other is refused: it has torch 2.12, and the run is for 2.11"]
    assert len(members) == 1 and gpus["other"].closed
    members.close()


def test_a_document_has_its_cells_in_their_places_after_each(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    record = Record(tmp_path / "found.json", "bench", {}, states)
    for place in (4, 0, 2):
        states.append({"name": str(place)})
        record.add(Cell(f"cell {place}", {}, (Entry("warploom"),)), place)
    found = read(tmp_path / "found.json")
    assert [cell["name"] for cell in found["cells"]] == ["cell 0", "cell 2", "cell 4"]
    assert len(found["states"]) == 3


def test_records_that_cannot_be_read_are_left_out_and_damaged_ones_are_sent_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte that is not UTF-8 was a traceback, and a pipe was read without end."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path))
    (tmp_path / "good.json").write_text("{}")
    (tmp_path / "damaged.json").write_bytes(b"\xff{")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    found, _ = cells.deciding()
    assert found == {"good.json": b"{}", "damaged.json": b"\xff{"}
    monkeypatch.setenv("WARPLOOM_RECORDS", "")  # which a process on a node sets
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "folder.json"))
    monkeypatch.setattr(cells, "CellProcess", lambda visible: visible)
    cells.cell_process(found, "")
    assert (tmp_path / "folder.json" / "damaged.json").read_bytes() == b"\xff{"


# ---- The process that measures -------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "state", dict)
    plain = runner.measured

    def instead(found: list[Case], asked: Asked) -> Iterator[Cell]:
        def sampler(calls: Sequence[Call]) -> Callable[[], float]:
            for call in calls:
                call()
            return lambda: 1e-3

        return plain(found, replace(asked, device="cpu"), sampler)

    monkeypatch.setattr(runner, "measured", instead)
    with torch.no_grad():
        yield


def test_what_is_measured_elsewhere_is_what_is_measured_here(
    on_cpu: None, space: Path, listed: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same contenders, those that were asked for by name and by kernel, and the same JSON."""
    built: list[KernelSpec] = []
    monkeypatch.setattr(worker, "build_many", built.extend)
    asked = replace(ASKED, peers=("cublas",), specs=listed[0].space[:1], baseline=Path("other.cu"))
    found = list(runner.cases(runner.named(NAMES), asked))
    (own,) = runner.measured(found[3:4], asked)
    told = json.loads(json.dumps(worker.request(NAMES, asked, 3, found[3])))
    process = worker.Worker(lambda message: None, device="cpu")
    answered = json.loads(json.dumps(process.reply({"cell": told})))
    cell = fleet.restored(answered["cell"])
    assert [one.contender for one in cell.entries] == [one.contender for one in own.entries]
    assert cell.entries[-1].contender == asked.specs[0].name and len(cell.entries) == 3
    assert built == [parse_name(asked.specs[0].name)]
    assert json.loads(json.dumps(cell.as_json())) == answered["cell"]
    assert cell.floor == own.floor
    assert cell.problem == own.problem


def test_a_node_whose_cells_are_others_does_not_measure_one_for_another(on_cpu: None) -> None:
    told = worker.request(NAMES, ASKED, 3, cases()[4])
    with pytest.raises(GpuLost, match="cell bf16 128x64x128"):
        worker.Worker(lambda message: None, device="cpu").reply({"cell": told})


PROCESS = """
import json, os, sys
say = lambda message: print(json.dumps(message), flush=True)
say({"gpu": "NVIDIA H200", "multiprocessors": 132, "versions": {"torch": "2.11", "l2_bytes": 5}})
for line in sys.stdin:
    name = json.loads(line)["cell"]["name"]
    if name == "fault":
        say({"illegal": "an illegal memory access was encountered"})
    if name == "exit":
        os._exit(3)
    if name == "other":
        say({"results": {}})
    if name == "hang":
        import time
        print("silence", flush=True)
        time.sleep(3600)
    say({"cell": {"name": name}, "state": {}})
"""


@pytest.mark.usefixtures("silence")
def test_a_process_that_a_cell_ended_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(PROCESS)
    gpu = CellProcess("0", [sys.executable, str(script)], starting=600, cell=2.0)
    assert dict(gpu.about.versions) == {"torch": "2.11", "l2_bytes": 5}
    ends = {
        "exit": "exit status 3",
        "fault": "illegal memory",
        "other": "said",
        "hang": "no answer for 2 seconds",
    }
    for name, why in ends.items():
        assert why in gpu.cell({"name": name})["ended"]
        assert gpu.cell({"name": "good"})["cell"] == {"name": "good"}
    for _ in range(DEATHS - 1):
        assert "ended" in gpu.cell({"name": "exit"})
    with pytest.raises(DeviceError, match=f"ended {DEATHS} times: .* exit status 3"):
        gpu.cell({"name": "exit"})
    gpu.close()

"""Tuning between calls, and processes: the one that compiles, ranks, and those where it is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import forked
import pytest
from autotuned import GPU
from forked import Program
from sweeps import environment

from warploom import variables
from warploom.errors import ConfigurationError, WarploomError
from warploom.generator import records_file
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.gpus import file_name
from warploom.generator.records import Record, Records, Timed
from warploom.generator.specification import KernelSpec
from warploom.runtime import records
from warploom.tuning.autotune import preparing
from warploom.tuning.autotune.helper import Helper

OPERATION, SHAPE = GemmOperation("bf16", "bf16", "bf16"), GemmShape(96, 640, 512, 1)
SCHEDULE = GemmSchedule((64, 64, 64), 4, consumers=1)
RECORD = Record(
    OPERATION,
    SHAPE,
    environment(),
    Timed(SCHEDULE, 1e-5, 0.0),
    None,
    measured="2026-11-23T00:00:00+00:00",
    autotuned=True,
)


def python(code: str, **settings: str) -> str:
    """What a program prints that loads torch."""
    (done,) = forked.run(Program(code, settings=settings))
    assert done.returncode == 0, done.stderr
    return done.stdout


def loads_torch(code: str, **settings: str) -> bool:
    """Whether a program does."""
    path = os.pathsep.join(filter(None, sys.path))
    program = [sys.executable, "-c", f"import sys\n{code}\nprint('torch' in sys.modules)"]
    environment = os.environ | {"PYTHONPATH": path} | settings
    return subprocess.check_output(program, env=environment, text=True) == "True\n"


# ---- On and off ----------------------------------------------------------------------------------

CALL = """
import sys, threading, torch, warploom
from warploom import hooks
warploom.gemm(torch.ones(8, 8).half(), torch.ones(8, 8).half())
names = [name for name in sys.modules if "autotune" in name or name == "warploom.tuning"]
print(sorted(names), hooks.observer, [one.name for one in threading.enumerate()])
"""


def test_nothing_of_it_is_loaded_or_started_where_it_is_off() -> None:
    assert python(CALL) == "[] None ['MainThread']\n"
    assert python(CALL, WARPLOOM_AUTOTUNE="0").startswith("[")


def test_the_variable_turns_it_on_with_the_first_call_that_is_planned() -> None:
    told = python(CALL, WARPLOOM_AUTOTUNE="1")
    assert "warploom.tuning.autotune.engine" in told and "'warploom.autotune'" in told
    assert not loads_torch("import warploom", WARPLOOM_AUTOTUNE="1")


@pytest.mark.parametrize(("given", "found"), [("", 0), ("0", 0), ("1", 1), ("20", 20)])
def test_the_variable_is_a_switch_or_a_budget(
    given: str, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_AUTOTUNE", given)
    assert variables.autotune_milliseconds() == found
    assert variables.mistakes() == {}


@pytest.mark.parametrize("given", ["yes", "-1", "inf", "nan"])
def test_what_is_no_budget_is_refused_by_name(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_AUTOTUNE", given)
    with pytest.raises(ConfigurationError, match=f"WARPLOOM_AUTOTUNE={given}: must be 1, or"):
        variables.autotune_milliseconds()
    assert variables.mistakes() == {
        "WARPLOOM_AUTOTUNE": "must be 1, or the milliseconds of GPU time for a new problem"
    }


# ---- The process that compiles -------------------------------------------------------------------


class FakeBuilder:
    """Builds when it is told how a kernel ends."""

    def __init__(self) -> None:
        self.builds: dict[KernelSpec, Future[Any]] = {}

    def submit(self, spec: KernelSpec) -> Future[Any]:
        return self.builds.setdefault(spec, Future())


def artifact(spec: KernelSpec, spills: int = 0) -> Artifact:
    entries = {spec.name: Resources(168, spills, 0)}
    return Artifact(spec.name, spec.arch, b"cubin", "", "", (), entries, (), 1.0)


def test_a_request_is_answered_with_the_kernels_that_can_be_measured() -> None:
    builder: Any = FakeBuilder()
    said: list[Any] = []
    first = KernelSpec("sm_90a", OPERATION, SCHEDULE)
    request = {
        "number": 7,
        "kernels": [first.name],
        "operation": asdict(OPERATION),
        "shape": asdict(SHAPE),
        "target": asdict(GPU),
    }
    preparing.serve(json.loads(json.dumps(request)), builder, said.append)
    specs = [*builder.builds]
    assert specs[0] == first and said == [{"number": 7, "compiling": len(specs)}]
    ends = [artifact(spec, spills=index == 1) for index, spec in enumerate(specs)]
    builder.builds[specs[2]].set_exception(WarploomError("not stored"))
    for spec, end in zip(specs, ends, strict=True):
        if spec != specs[2]:
            assert len(said) == 1
            builder.builds[spec].set_result(end)
    built = [spec.name for spec in specs if spec not in specs[1:3]]
    assert said[1:] == [{"number": 7, "built": built}]


def test_a_request_that_cannot_be_read_fails_alone() -> None:
    builder: Any = FakeBuilder()
    said: list[Any] = []
    preparing.serve({"number": 1, "kernels": ["no_kernel"]}, builder, said.append)
    assert said[0]["number"] == 1 and "no_kernel" in said[0]["failed"]


ECHO = """
import json, sys
for line in sys.stdin:
    if line == "\\n":
        break
    request = json.loads(line)
    if not request["kernels"]:
        sys.exit(3)
    print(json.dumps({"number": request["number"], "built": request["kernels"]}), flush=True)
"""


def test_the_process_answers_by_number_and_its_death_is_told() -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    helper = Helper(answers.put, [sys.executable, "-c", ECHO])
    spec = KernelSpec("sm_90a", OPERATION, SCHEDULE)
    assert [helper.build([spec]), helper.build([spec])] == [1, 2]
    assert answers.get(timeout=600) == {"number": 1, "built": [spec.name]}
    assert answers.get(timeout=600)["number"] == 2
    helper.done(1)
    process = helper._process
    assert process is not None and process.poll() is None
    helper.done(2)
    assert process.wait(600) == 0
    assert helper.build([]) == 3  # another process, which dies of it
    told = answers.get(timeout=600)
    assert told["number"] == 3 and told["failed"].endswith("ended with exit status 3")


def test_what_is_asked_after_a_death_is_answered_by_another_process() -> None:
    """A request that came before the death was taken note of went to nobody, and none later did."""
    answers: SimpleQueue[Any] = SimpleQueue()
    helper = Helper(answers.put, [sys.executable, "-c", ECHO])
    spec = KernelSpec("sm_90a", OPERATION, SCHEDULE)
    assert helper.build([]) == 1
    assert answers.get(timeout=600)["failed"].endswith("ended with exit status 3")
    assert helper.build([spec]) == 2
    helper.done(1)
    assert answers.get(timeout=600) == {"number": 2, "built": [spec.name]}
    helper.done(2)


def test_the_process_ends_though_a_forked_child_has_its_pipe() -> None:
    """It waited, idle, for as long as a worker of a data loader lived."""
    answers: SimpleQueue[Any] = SimpleQueue()
    helper = Helper(answers.put, [sys.executable, "-c", ECHO])
    helper.build([KernelSpec("sm_90a", OPERATION, SCHEDULE)])
    answers.get(timeout=600)
    process = helper._process
    assert process is not None
    with forked.sleeping():
        helper.done(1)
        assert process.wait(600) == 0


def test_what_compiles_loads_no_torch() -> None:
    assert not loads_torch("import warploom.tuning.autotune.preparing")


# ---- Records -------------------------------------------------------------------------------------


def test_a_record_says_that_it_was_autotuned_and_an_ordinary_one_says_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "records.json"
    for one in (RECORD, replace(RECORD, autotuned=False)):
        path.unlink(missing_ok=True)
        records_file.update(path, GPU.gpu, [one])
        assert [*records_file.read(path)] == [one]
        assert ("autotuned" in path.read_text()) == one.autotuned


def test_what_was_learnt_decides_and_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_read", lambda gpu: records.Known(Records(gpu), None))
    records.forget()
    before = records.digest(GPU.gpu)
    records.learn(GPU.gpu, [RECORD])
    assert records.known(GPU.gpu).records.exact(OPERATION, SHAPE, RECORD.environment) == RECORD
    assert records.digest(GPU.gpu) != before
    records.forget()
    assert records.digest(GPU.gpu) == before
    records.forget()


RANK = """
import os, sys
import torch.distributed as distributed
import warploom
from warploom.runtime import records
distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2
)
for folder in sys.argv[3:]:
    os.environ["WARPLOOM_RECORDS_DIR"] = folder
    records.forget()
    try:
        warploom.assert_same_records(gpu="NVIDIA H200")
        print("same", warploom.records_digest("NVIDIA H200"))
    except warploom.RecordsError as error:
        print(error)
distributed.destroy_process_group()
"""


def test_ranks_that_decide_by_other_records_are_named(tmp_path: Path) -> None:
    """Both ranks read one folder, and then each its own."""
    one, other = tmp_path / "one", tmp_path / "other"
    records_file.update(one / file_name(GPU.gpu), GPU.gpu, [RECORD])
    ranks = [
        Program(
            RANK,
            [str(rank), str(tmp_path / "meeting"), str(one), str((one, other)[rank])],
            {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]
    told = [done.stdout.splitlines() for done in forked.run(*ranks)]
    assert told[0] == told[1]
    assert told[0][0].startswith("same ")
    assert told[0][1].startswith("ranks 1 of 2: must decide by the same records")

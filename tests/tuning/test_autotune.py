"""Problems that calls meet are tuned between them: the whole life of one, on a machine made up."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autotuned import GPU, READY, Machine, call, plan_of, until

from warploom.generator import records_file
from warploom.generator.gpus import file_name
from warploom.generator.records import Records
from warploom.tuning.autotune.candidates import COUNT, TAILORED
from warploom.tuning.autotune.contest import NotMeasured
from warploom.tuning.autotune.course import LIKELY
from warploom.tuning.autotune.problem import Gate


def kept(folder: Path) -> Records:
    return records_file.known(folder / file_name(GPU.gpu), GPU.gpu)


def test_a_new_problem_runs_untuned_is_measured_by_a_later_call_and_then_runs_the_winner(
    machine: Machine, folder: Path
) -> None:
    machine.enter(0.05)
    machine.helper.held = True
    plan = plan_of()
    untuned = plan.choice.spec
    assert machine.engine.told(plan.choice) in ("about to be compiled", "compiling its candidates")
    until(lambda: bool(machine.helper.asked))
    assert call(plan) == untuned
    assert machine.measured == []
    machine.helper.finish(1)
    until(lambda: isinstance(plan.launch, Gate))
    assert machine.status() == READY == machine.engine.told(plan.choice)
    assert call(plan) == untuned  # the call that measures
    (specs,) = machine.measured
    assert untuned in specs and 0 <= len(specs) - LIKELY - COUNT <= 2 + TAILORED
    until(lambda: isinstance(plan.launch, Gate) or plan.choice.spec != untuned)
    call(plan)
    assert plan.choice.spec == machine.best(untuned, specs) == call(plan)
    assert plan.choice.reason.startswith("autotuned 20")
    (record,) = kept(folder)
    assert record.autotuned and record.best.schedule == plan.choice.spec.schedule
    assert record.default and record.speedup == 2.0
    assert plan_of().choice.spec == plan.choice.spec
    assert len(machine.measured) == len(machine.helper.asked) == 1
    (told,) = machine.engine.problems()
    assert (told.status, told.before, told.after) == ("tuned", untuned.name, plan.choice.spec.name)
    assert not list(folder.glob("autotune/*"))  # nobody holds a lock any longer


def test_a_call_under_a_capture_measures_nothing_and_keeps_its_kernel(machine: Machine) -> None:
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: isinstance(plan.launch, Gate))
    machine.capturing = True
    untuned = plan.choice.spec
    assert call(plan) == untuned == call(plan)
    assert machine.measured == [] and machine.status() == READY
    machine.capturing = False
    call(plan)
    until(lambda: isinstance(plan.launch, Gate))
    machine.capturing = True  # what is captured now may load no kernel
    assert call(plan) == untuned == plan.choice.spec
    machine.capturing = False
    call(plan)
    assert call(plan) != untuned


def test_the_present_kernel_stays_where_nothing_is_faster(machine: Machine, folder: Path) -> None:
    machine.pick = lambda present, specs: present
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: isinstance(plan.launch, Gate))
    untuned = call(plan)
    until(lambda: machine.status() == "tuned")
    assert call(plan) == untuned and plan.choice.reason.startswith("autotuned")
    assert len(kept(folder)) == 1


def test_a_problem_with_a_record_or_a_named_kernel_is_left_alone(machine: Machine) -> None:
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: isinstance(plan.launch, Gate))
    call(plan)
    until(lambda: machine.status() == "tuned")
    plan_of()
    named = plan_of(m=200)
    named.choice = replace(named.choice, asked=None)
    assert machine.engine.told(named.choice) == ""
    until(lambda: len(machine.helper.asked) == 2)  # that of 200 rows, before it was named


def test_what_measuring_loads_is_loaded_before_a_call_measures(machine: Machine) -> None:
    """torch loaded its kernels in the first call that measured, which took 0.4 s."""
    machine.enter(0.05)
    plans = [plan_of(m=m) for m in (96, 192)]
    until(lambda: all(isinstance(plan.launch, Gate) for plan in plans))
    assert [device for _, device in machine.rehearsed] == [0]
    assert machine.measured == []


def test_a_rehearsal_that_fails_stops_nothing(machine: Machine) -> None:
    def fail(operation: object, device: int) -> None:
        raise RuntimeError("CUDA out of memory")

    machine.rehearse = fail
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: isinstance(plan.launch, Gate))
    call(plan)
    until(lambda: machine.status() == "tuned")


def test_two_threads_that_call_at_once_measure_once(machine: Machine) -> None:
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: isinstance(plan.launch, Gate))
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert leave.wait(600)

    machine.during = wait
    entered: Any = plan.launch  # as the other thread has it, which came to it at the same time
    first = threading.Thread(target=call, args=(plan,))
    first.start()
    assert inside.wait(600)
    entered.run((), (), lambda: None)  # waits for nobody
    assert call(plan) == plan.choice.spec
    leave.set()
    first.join()
    until(lambda: machine.status() == "tuned")
    assert len(machine.measured) == 1


def test_plans_that_lie_otherwise_get_what_the_record_says_for_them(machine: Machine) -> None:
    """The winner stores by TMA, which these rows do not allow: its like is built before it runs."""
    machine.enter(0.05)
    dense, ragged = plan_of(n=640), plan_of(n=640, aligned=False)
    until(lambda: isinstance(dense.launch, Gate) and isinstance(ragged.launch, Gate))
    call(dense)
    until(lambda: machine.status() == "tuned")
    for plan in (dense, ragged):
        call(plan)
        assert plan.choice.reason.startswith("autotuned")
    assert ragged.choice.spec.schedule.store == "direct"
    assert len(machine.measured) == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NotMeasured("50 ms of GPU time do not suffice"), "not tuned: 50 ms of GPU time do not"),
        (RuntimeError("CUDA error\nmore"), "not tuned: CUDA error"),
    ],
)
def test_what_cannot_be_measured_runs_as_before_and_is_not_tried_again(
    machine: Machine, folder: Path, error: Exception, told: str
) -> None:
    def fail() -> None:
        raise error

    machine.during = fail
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: isinstance(plan.launch, Gate))
    untuned = call(plan)
    until(lambda: machine.status().startswith(told))
    assert call(plan) == untuned and not isinstance(plan.launch, Gate)
    plan_of()
    assert len(machine.measured) == 1 and not list(folder.glob("*.json"))


def test_without_candidates_there_is_nothing_to_measure(machine: Machine) -> None:
    machine.helper.fails = "the process that compiles ended with SIGKILL"
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: machine.status() == "not tuned: the process that compiles ended with SIGKILL")
    call(plan)
    assert machine.measured == []


def test_records_that_cannot_be_kept_are_told_of_once(
    machine: Machine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.joinpath("autotune").write_text("in the way of a folder")
    machine.enter(0.05)
    plans = [plan_of(m=m) for m in (96, 192)]
    until(
        lambda: (
            [one.status for one in machine.engine.problems()].count(
                "not tuned: records cannot be kept"
            )
            == 2
        )
    )
    assert [record.message.partition(":")[0] for record in caplog.records] == ["autotune"]
    assert [isinstance(plan.launch, Gate) for plan in plans] == [False, False]

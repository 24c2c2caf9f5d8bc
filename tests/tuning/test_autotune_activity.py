"""Tuning between calls is on while somebody has it active, and in one process for each problem."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from autotuned import GPU, READY, Machine, call, plan_of, until

from warploom import hooks
from warploom.errors import ConfigurationError
from warploom.generator import records_file
from warploom.generator.gpus import file_name
from warploom.generator.records import Record, Timed
from warploom.runtime import records
from warploom.runtime.decision import Asked
from warploom.tuning.autotune import api, locks
from warploom.tuning.autotune.candidates import candidates
from warploom.tuning.autotune.problem import Gate

# ---- Who has it active ---------------------------------------------------------------------------


def test_contexts_and_decorators_nest_and_the_last_one_ends_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "ENGINE", machine.engine)

    @api.autotune(milliseconds=20)
    def inside() -> object:
        return hooks.observer

    with api.autotune() as outer:
        assert inside() is hooks.observer is machine.engine
        plan = plan_of()
        until(lambda: isinstance(plan.launch, Gate))
        assert [one.status for one in outer.problems] == [READY]
    assert hooks.observer is None
    untuned = plan.choice.spec
    assert call(plan) == untuned and machine.measured == []
    with api.autotune():
        call(plan)
        until(lambda: machine.status() == "tuned")
    assert call(plan) == untuned  # nobody asks for another kernel now
    with api.autotune():
        call(plan)
        assert call(plan) != untuned


@pytest.mark.parametrize("milliseconds", [0, -1, float("inf"), "50", True])
def test_a_budget_that_is_none_is_refused_by_name(milliseconds: float) -> None:
    with pytest.raises(ConfigurationError, match=r"milliseconds .*must be a number, more than 0"):
        api.autotune(milliseconds=milliseconds)


def test_it_is_refused_where_records_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_RECORDS", "ignore")
    with pytest.raises(ConfigurationError, match="keeps what it finds in records"), api.autotune():
        pass


def test_a_forked_child_tunes_nothing_and_waits_for_nobody(machine: Machine) -> None:
    os.register_at_fork(after_in_child=machine.engine.fresh)
    machine.engine.enter(0.05)
    plan = plan_of()
    until(lambda: isinstance(plan.launch, Gate))
    child = os.fork()
    if not child:
        call(plan)
        os._exit(0 if hooks.observer is None and not machine.measured else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("jobs", [0, -1, 1.5, "4", True])
def test_compilers_that_are_no_number_of_them_are_refused_by_name(jobs: object) -> None:
    with pytest.raises(ConfigurationError, match=r"jobs .*must be a whole number of processes"):
        api.autotune(jobs=jobs)  # type: ignore[arg-type]


def test_as_many_kernels_are_compiled_at_a_time_as_was_asked_for_last(machine: Machine) -> None:
    machine.engine.enter(0.05, 12)
    machine.engine.enter(0.05)
    assert machine.helper.jobs == 12


# ---- Several processes ---------------------------------------------------------------------------


def tuned_elsewhere() -> tuple[locks.ProblemLock, Asked]:
    """The lock of the problem of `plan_of`, as another process has it."""
    asked = plan_of().choice.asked
    assert asked is not None
    lock = locks.take(GPU.gpu, asked.operation, asked.shape)
    assert lock is not None
    assert locks.take(GPU.gpu, asked.operation, asked.shape) is None
    return lock, asked


def test_what_another_process_records_is_run_without_measuring(
    machine: Machine, folder: Path
) -> None:
    lock, asked = tuned_elsewhere()
    machine.engine.enter(0.05)
    plan = plan_of()
    until(lambda: machine.status() == "another process tunes it")
    untuned, before = call(plan), records.digest(GPU.gpu)
    found = candidates(asked.operation, asked.shape, GPU)
    winner = machine.best(untuned, found)
    here = records.environment(GPU, asked.operation.family)
    best = Timed(winner.schedule, 1e-5, 0.0)
    record = Record(asked.operation, asked.shape, here, best, None, measured="2026-11-23T00:00")
    records_file.update(folder / file_name(GPU.gpu), GPU.gpu, [record])
    until(lambda: isinstance(plan.launch, Gate))
    call(plan)
    assert call(plan) == winner and machine.measured == []
    assert machine.helper.asked == [[winner.name]]  # built before a call had to wait for it
    assert records.digest(GPU.gpu) != before
    lock.release()


def test_where_another_process_ends_without_a_record_this_one_tunes(machine: Machine) -> None:
    lock, _ = tuned_elsewhere()
    machine.engine.enter(0.05)
    plan = plan_of()
    until(lambda: machine.status() == "another process tunes it")
    lock.release()
    until(lambda: isinstance(plan.launch, Gate))
    untuned = call(plan)
    until(lambda: machine.status() == "tuned")
    call(plan)
    assert call(plan) != untuned

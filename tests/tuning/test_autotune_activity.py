"""Tuning between calls is on while somebody has it active, and in one process for each problem."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from autotuned import GPU, READY, FakeLaunch, Machine, call, plan_of, until

import warploom
from warploom import hooks
from warploom.errors import ConfigurationError
from warploom.generator import records_file
from warploom.generator.gpus import file_name
from warploom.generator.records import Record, Timed, problem_text
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan as planning
from warploom.runtime import records
from warploom.runtime.dispatch import Asked
from warploom.runtime.plan import Plan, alive
from warploom.tuning.autotune import api, course, locks, offers
from warploom.tuning.autotune.activity import Activity
from warploom.tuning.autotune.candidates import candidates
from warploom.tuning.autotune.contest import NotMeasured
from warploom.tuning.autotune.course import Course
from warploom.tuning.autotune.engine import Engine
from warploom.tuning.autotune.problem import Gate, Problem

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
    assert isinstance(hooks.observer, hooks.Nobody)
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
    with pytest.raises(ConfigurationError, match="writes tuned configs"), api.autotune():
        pass


def test_a_forked_child_tunes_nothing_and_waits_for_nobody(machine: Machine) -> None:
    os.register_at_fork(after_in_child=machine.engine.fresh)
    machine.enter(0.05)
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
    machine.enter(0.05, 12)
    machine.enter(0.05)
    assert machine.helper.jobs == 12


def test_a_call_that_is_planned_while_the_last_context_closes_tells_nobody(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread had read that somebody listens, and then told None: an AttributeError."""
    context = machine.enter()

    class Closing:
        """The module that says who listens, of which the first answer is true no longer."""

        @property
        def observer(self) -> object:
            found = hooks.observer
            if isinstance(found, Engine):
                machine.engine.leave(context)
            return found

    monkeypatch.setattr(planning, "hooks", Closing())
    a, b = torch.ones(7, 112).bfloat16(), torch.ones(112, 59).bfloat16()
    assert warploom.gemm(a, b).shape == (7, 59)
    assert machine.engine.report(context).problems == ()


def test_a_variable_that_turns_it_off_leaves_what_another_thread_has_begun(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "ENGINE", machine.engine)
    monkeypatch.setenv("WARPLOOM_AUTOTUNE", "0")
    with api.autotune():
        api.by_environment()  # as the first call of another thread does
        assert hooks.observer is machine.engine
    api.by_environment()
    assert isinstance(hooks.observer, hooks.Nobody)


def test_a_context_that_closes_while_a_call_is_about_to_run_another_kernel_keeps_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = machine.enter()
    plan = plan_of()
    until(lambda: machine.status() == READY)
    untuned = call(plan)
    until(lambda: machine.status() == "tuned")

    def late(spec: KernelSpec, *_: object) -> FakeLaunch:
        machine.engine.leave(context)
        return FakeLaunch(spec)

    with monkeypatch.context() as patch:
        patch.setattr(offers, "plan_launches", late)
        assert call(plan) == untuned == call(plan)
    machine.enter()
    call(plan)
    assert call(plan) != untuned


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
    machine.enter(0.05)
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


def test_a_record_of_a_kernel_that_is_not_legal_is_no_reason_not_to_tune(
    machine: Machine, folder: Path
) -> None:
    """Of another version: calls pass it over, and it was taken for what they run."""
    plan = plan_of()
    asked = plan.choice.asked
    assert asked is not None
    here = records.environment(GPU, asked.operation.family)
    best = Timed(replace(plan.choice.spec.schedule, stages=99), 1e-5, 0.0)
    record = Record(asked.operation, asked.shape, here, best, None, measured="2026-11-23T00:00")
    records_file.update(folder / file_name(GPU.gpu), GPU.gpu, [record])
    machine.enter(0.05)
    call(plan)
    until(lambda: machine.status() == READY)
    call(plan)
    until(lambda: machine.status() == "tuned")


def test_where_another_process_ends_without_a_record_this_one_tunes(machine: Machine) -> None:
    lock, _ = tuned_elsewhere()
    machine.enter(0.05)
    plan = plan_of()
    until(lambda: machine.status() == "another process tunes it")
    lock.release()
    until(lambda: isinstance(plan.launch, Gate))
    untuned = call(plan)
    until(lambda: machine.status() == "tuned")
    call(plan)
    assert call(plan) != untuned


def test_a_forked_child_keeps_no_problem_of_a_process_that_has_ended(machine: Machine) -> None:
    """Others waited for a worker of a data loader whose process had been killed."""
    os.register_at_fork(after_in_child=machine.engine.fresh)
    asked = plan_of().choice.asked
    assert asked is not None
    machine.helper.held = True
    machine.enter()
    plan_of()
    until(lambda: machine.status().startswith("compiling"))
    (problem,) = machine.engine._course.problems()
    with forked.sleeping():
        assert problem.lock is not None
        problem.lock.abandon()  # as the system does for a process that is killed
        problem.lock = locks.take(GPU.gpu, asked.operation, asked.shape)
        assert problem.lock is not None


@pytest.mark.parametrize("at", ["find", "fetched", "record_of"])
def test_an_error_ends_a_problem_and_lets_others_tune_it(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It was "compiling" or "measured" from then on, and no other process could tune it."""

    def fail(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(machine.helper if at == "find" else course, at, fail)
    machine.enter()
    plan = plan_of()
    if at == "record_of":
        until(lambda: machine.status() == READY)
        call(plan)
    until(lambda: machine.status().startswith("not tuned"))
    assert machine.status().endswith("Resource temporarily unavailable")
    assert not isinstance(plan.launch, Gate) and not [*folder.glob("autotune/*")]


def test_an_interrupt_of_the_call_that_measures_ends_its_problem(
    machine: Machine, folder: Path
) -> None:
    """The end of the process waited for a record that nobody would write."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    machine.during = interrupt
    machine.enter()
    plan = plan_of()
    until(lambda: machine.status() == READY)
    with pytest.raises(KeyboardInterrupt):
        call(plan)
    until(lambda: machine.status() == "not tuned: the call that measured it was interrupted")
    assert not [*folder.glob("autotune/*")]
    until(lambda: machine.engine._activity._unwritten == 0)


# ---- Plans that there were -----------------------------------------------------------------------


def test_a_plan_that_was_made_before_is_tuned_once_a_call_of_it_comes(machine: Machine) -> None:
    """A context that began after the first calls tuned nothing, and said nothing of it."""
    called, other = plan_of(), plan_of(m=200)
    untuned = call(called)
    with_gates = machine.enter()
    assert machine.engine.report(with_gates).problems == ()
    assert call(called) == untuned
    until(lambda: machine.status() == READY)
    call(called)
    until(lambda: machine.status() == "tuned")
    call(called)
    assert call(called) == called.choice.spec != untuned
    assert not isinstance(called.launch, Gate)
    (one,) = machine.engine.report(with_gates)
    assert (one.outcome, one.before, one.after) == ("improved", untuned.name, call(called).name)
    assert len(machine.helper.asked) == 1  # what is not called is not compiled
    machine.engine.leave(with_gates)
    assert not isinstance(other.launch, Gate)


def test_a_call_is_as_it_was_once_nobody_has_it_active(machine: Machine) -> None:
    plans = [plan_of(m=m) for m in (96, 200)]
    launches = [plan.launch for plan in plans]
    context = machine.enter()
    assert all(isinstance(plan.launch, Gate) for plan in plans)
    machine.engine.leave(context)
    assert [plan.launch for plan in plans] == launches
    call(plans[0])
    assert machine.engine.report(context).problems == () == tuple(machine.engine.problems())


def test_a_second_context_meets_the_plans_of_the_first_anew(machine: Machine) -> None:
    plan = plan_of()
    first = machine.enter()
    call(plan)
    until(lambda: machine.status() == READY)
    machine.engine.leave(first)
    call(plan)
    assert machine.measured == []
    second = machine.enter()
    assert len(machine.engine.report(second)) == 0
    call(plan)
    until(lambda: machine.status() == "tuned")
    outcomes = [one.outcome for met in (first, second) for one in machine.engine.report(met)]
    assert outcomes == ["improved", "improved"]
    call(plan)
    machine.engine.leave(second)
    third = machine.enter()
    call(plan)
    (one,) = machine.engine.report(third)
    assert one.outcome == "recorded before" and not isinstance(plan.launch, Gate)


def test_a_context_that_closes_while_a_call_is_about_to_measure_leaves_it_to_the_next(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call failed for want of a budget, and its problem was never measured again."""
    plan = plan_of()
    first = machine.enter()
    untuned = call(plan)
    until(lambda: machine.status() == READY)

    def closes(device: int) -> bool:
        machine.engine.leave(first)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(machine.engine._course._offers, "_may_measure", closes)
        assert call(plan) == untuned
    assert machine.measured == [] and machine.status() == READY
    machine.enter()
    call(plan)
    until(lambda: machine.status() == "tuned")


def test_an_inner_context_reports_what_comes_in_it_and_the_outer_one_all(machine: Machine) -> None:
    early, late = plan_of(), plan_of(m=200)
    outer = machine.enter()
    call(early)
    until(lambda: machine.status() == READY)
    inner = machine.enter()
    call(late)
    until(lambda: [one.status for one in machine.engine.problems()] == [READY, READY])
    assert len(machine.engine.report(inner)) == 1 and len(machine.engine.report(outer)) == 2
    machine.engine.leave(inner)
    for plan in (early, late):
        call(plan)
    until(lambda: [one.status for one in machine.engine.problems()] == ["tuned", "tuned"])
    assert machine.engine.report(outer).counts == {"improved": 2}


def test_a_plan_that_was_made_before_and_is_captured_is_measured_later(machine: Machine) -> None:
    plan = plan_of()
    machine.capturing = True
    machine.enter()
    untuned = call(plan)
    until(lambda: machine.status() == READY)
    assert call(plan) == untuned and machine.measured == []
    machine.capturing = False
    call(plan)
    until(lambda: machine.status() == "tuned")


def test_a_call_that_reads_that_a_problem_waits_for_it_is_offered_to_measure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status said so before the gates were open, and a last call passed none."""
    opened = Problem.open

    def late(problem: Problem, offer: Callable[[Plan[Any, Any]], Callable[[], None]]) -> None:
        time.sleep(0.3)
        opened(problem, offer)

    monkeypatch.setattr(Problem, "open", late)
    machine.enter()
    plan = plan_of()
    until(lambda: machine.status() == READY)
    call(plan)
    until(lambda: machine.status() == "tuned")


def test_a_problem_that_is_tuned_says_what_was_measured_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report called a problem "recorded before" that had just been measured."""
    renewed = Course._renew

    def late(course: Course, problem: Problem, **how: bool) -> None:
        renewed(course, problem, **how)
        time.sleep(0.3)

    plan = plan_of()
    context = machine.enter()
    call(plan)
    until(lambda: machine.status() == READY)
    monkeypatch.setattr(Course, "_renew", late)
    call(plan)
    until(lambda: machine.status() == "tuned")
    assert machine.engine.report(context).counts == {"improved": 1}


def test_a_problem_that_is_being_measured_owes_its_record(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ended right then would not have waited for it."""
    owe, said = Activity.owe, []

    def noted(activity: Activity, more: int) -> None:
        said.append(machine.status())
        owe(activity, more)

    machine.enter()
    plan = plan_of()
    until(lambda: machine.status() == READY)
    monkeypatch.setattr(Activity, "owe", noted)
    call(plan)
    assert said[0] == READY  # and not "measured" yet


def test_threads_that_call_a_plan_that_was_made_before_meet_one_problem(machine: Machine) -> None:
    plan = plan_of()
    machine.helper.held = True
    context = machine.enter()
    start = threading.Barrier(8)

    def run() -> None:
        start.wait(600)
        call(plan)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    until(lambda: len(machine.helper.asked) == 1)
    assert machine.engine.report(context).counts == {"not finished": 1}
    assert not isinstance(plan.launch, Gate)


def test_a_larger_budget_tries_again_what_a_smaller_one_did_not_suffice_for(
    machine: Machine,
) -> None:
    plan = plan_of()

    def fail() -> None:
        raise NotMeasured("1 ms of GPU time do not suffice")

    machine.during = fail
    first = machine.enter(0.001)
    call(plan)
    until(lambda: machine.status() == READY)
    call(plan)
    until(lambda: machine.status().startswith("not tuned"))
    (one,) = machine.engine.report(first)
    assert (one.outcome, one.status) == ("not tuned", "not tuned: 1 ms of GPU time do not suffice")
    machine.engine.leave(first)
    machine.during = lambda: None
    for budget, ends in ((0.001, "not tuned"), (0.05, "tuned")):
        context = machine.enter(budget)
        call(plan)
        if ends == "tuned":
            until(lambda: machine.status() == READY)
            call(plan)
        until(lambda ends=ends: machine.status().startswith(ends))  # type: ignore[misc]
        machine.engine.leave(context)
    assert len(machine.measured) == 2


def test_the_report_counts_what_is_not_tuned_and_says_why(machine: Machine) -> None:
    plans = {name: plan_of(m=m) for m, name in enumerate(("named", "cpu", "recorded"), 96)}
    plans["named"].choice = replace(plans["named"].choice, asked=None)
    asked = plans["recorded"].choice.asked
    assert asked is not None
    plans["recorded"].choice = replace(
        plans["recorded"].choice, asked=replace(asked, recorded=True)
    )
    context = machine.enter()
    for plan in plans.values():
        call(plan)
    plans["cpu"].launch = None
    until(lambda: len(machine.engine.problems()) == 1)
    later = machine.enter()
    machine.engine.planned(plans["cpu"])
    counts = {"not finished": 1, "recorded before": 1, "named": 1}
    assert machine.engine.report(context).counts == counts
    assert machine.engine.report(later).counts == {"reference": 1}
    told = str(machine.engine.report(context))
    assert told.startswith("warploom.autotune met 3 problems:\n  1 not finished\n")
    assert "1 not tuned, because the caller named the kernel (spec=)" in told
    assert f"\nnamed: {plans['named'].choice.spec.name}: the caller named it" in told
    assert f"\nrecorded before: {problem_text(asked.operation, asked.shape)}: " in told
    assert "the tensors are on the CPU" in str(machine.engine.report(later))


def test_a_context_in_which_nothing_came_says_so(machine: Machine) -> None:
    plan_of()
    told = str(machine.engine.report(machine.enter()))
    assert told.startswith("warploom.autotune met 0 problems: no call of a kernel came while it")


def test_products_of_the_public_functions_on_the_cpu_are_reported_as_such() -> None:
    a, b = torch.ones(7, 112).bfloat16(), torch.ones(112, 56).bfloat16()
    plan = warploom.plan(a, b)
    for run in (lambda: warploom.gemm(a, b, bias=b[0]), lambda: plan(a, b)):
        for _ in range(3):  # the second time no call is made, and the third it was before
            with warploom.autotune() as tuning:
                run()
                run()
            assert tuning.report.counts == {"reference": 1} and tuning.problems == []
            run()
    with warploom.autotune() as tuning:
        pass
    assert not any({"run", "run_at"} & vars(one).keys() for one in alive())

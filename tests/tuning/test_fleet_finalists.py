"""Finalists are measured on two GPUs: who is asked, and what two GPUs must both say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fleets import Fake, Results, Run, run
from sweeps import default_of, swept_seconds

from warploom.generator.specification import KernelSpec
from warploom.tuning.fleet.agreement import agreed
from warploom.tuning.gpu import Batch
from warploom.tuning.journal import Result
from warploom.tuning.problems import Problem
from warploom.tuning.search import Search
from warploom.tuning.tuner import FINAL_PRECISION


@pytest.fixture(scope="module")
def local(listed: list[Problem], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What one GPU of this host finds."""
    return run(listed, tmp_path_factory.mktemp("local"), {"0": Fake(listed)})


def test_finalists_are_measured_on_two_gpus_unless_the_default_stands(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    gpus = {"a": Fake(listed), "b": Fake(listed)}
    found = run(listed, tmp_path, gpus, confirms=True)
    assert found.picks == local.picks
    finals = Counter(
        (one.operation, one.shape)
        for gpu in gpus.values()
        for one in {id(batch): batch for batch in gpu.batches}.values()
        if one.precision == FINAL_PRECISION
    )
    picks = {(one.operation, one.shape): found.picks[one.operation, one.shape] for one in listed}
    defaults = {(one.operation, one.shape): default_of(one).schedule for one in listed}
    assert finals == {key: 1 if picks[key] == defaults[key] else 2 for key in picks}
    assert set(finals.values()) == {1, 2}
    for key in (key for key, count in finals.items() if count == 2):
        asked = [
            {spec.schedule for spec in batch.specs}
            for gpu in gpus.values()
            for batch in gpu.batches
            if batch.precision == FINAL_PRECISION and (batch.operation, batch.shape) == key
        ]
        second, first = sorted(asked, key=len)
        assert {defaults[key], picks[key]} <= second <= first


def lying(listed: list[Problem], lie: Callable[[KernelSpec, Result], Result]) -> Fake:
    """A GPU whose results of finalists are what `lie` makes of them."""

    def lies(batch: Batch, found: Results) -> Results:
        if batch.precision != FINAL_PRECISION:
            return found
        return {spec: lie(spec, one) for spec, one in found.items()}

    return Fake(listed, lies=lies)


def test_finalists_of_which_none_works_are_measured_on_another_gpu(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    def wrong(spec: KernelSpec, one: Result) -> Result:
        return Result(spec.schedule, "wrong", reason="as the test has it")

    gpus = {"a": lying(listed, wrong), "b": Fake(listed), "c": Fake(listed)}
    found = run(listed, tmp_path, gpus, confirms=True)
    assert found.picks == local.picks
    assert any("GPU a: no kernel of a batch is right" in said for said in found.said)


def test_where_another_gpu_refutes_the_fastest_it_is_asked_of_the_next(
    listed: list[Problem], tmp_path: Path
) -> None:
    """Else the default would win over what no GPU has said to be slower."""
    problem = listed[0]
    default = default_of(problem)
    finalists = sorted(
        (spec for spec in problem.space if spec != default),
        key=lambda spec: swept_seconds(problem, spec, 0.03),
    )
    fastest = finalists[0]

    def refuted(spec: KernelSpec, one: Result) -> Result:
        return replace(one, relative=1.2) if spec == fastest else one

    def rated(spec: KernelSpec, one: Result) -> Result:
        if spec == default:
            return one
        place = finalists.index(spec)
        return replace(one, relative=0.9 + 0.02 * (place % 3) if place else 0.8)

    second = lying([problem], lambda spec, one: refuted(spec, rated(spec, one)))
    gpus = {"a": lying([problem], rated), "b": second}
    found = run([problem], tmp_path, gpus, confirms=True)
    pick = found.picks[problem.operation, problem.shape]
    assert pick not in (default.schedule, fastest.schedule)
    (record,) = (one.record for one in found.ended)
    assert record and record.runners_up


def test_no_second_opinion_takes_a_pick_from_a_default_that_stands(listed: list[Problem]) -> None:
    """So nobody is asked for one."""
    problem, fate, stood = listed[0], random.Random(5), 0
    default = default_of(problem)
    finalists = [default, *(spec for spec in problem.space if spec != default)][:4]

    def opinion(wrong: bool = False) -> Results:
        return {
            spec: Result(spec.schedule, "wrong")
            if wrong and spec != default and fate.random() < 0.1
            else Result(
                spec.schedule,
                "correct",
                1e-5,
                0.1,
                1.0 if spec == default else fate.uniform(0.95, 1.05),
                fate.choice((0.003, 0.01, 0.03)),
            )
            for spec in finalists
        }

    for _ in range(2000):
        first, search = opinion(), Search(default, ())
        if search.stands(first):
            stood += 1
            search.finals = agreed(first, opinion(wrong=True))
            assert search.winner() == default
    assert 100 < stood < 1900


def test_what_only_one_gpu_finds_faster_is_a_tie_which_the_default_wins(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """A pick that rests on one GPU is not the kind's: on the other the default is faster."""

    def slower(batch: Batch, found: Results) -> Results:
        if batch.precision != FINAL_PRECISION:
            return found
        default = next(iter(found))
        return {
            spec: one if spec == default else replace(one, relative=1.02)
            for spec, one in found.items()
        }

    gpus = {"a": Fake(listed), "b": Fake(listed, lies=slower)}
    found = run(listed, tmp_path, gpus, confirms=True)
    defaults = {(one.operation, one.shape): default_of(one).schedule for one in listed}
    assert found.picks == defaults != local.picks


def test_a_kernel_that_is_wrong_on_one_of_two_gpus_is_no_candidate(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    bad = set(local.picks.values()) - {default_of(one).schedule for one in listed}

    def wrong(batch: Batch, found: Results) -> Results:
        return {
            spec: Result(spec.schedule, "wrong", reason="here") if spec.schedule in bad else one
            for spec, one in found.items()
        }

    gpus = {"a": Fake(listed), "b": Fake(listed, lies=wrong)}
    found = run(listed, tmp_path, gpus, confirms=True)
    assert len(found.saved) == 3 and found.alarms
    assert not bad & {timed.schedule for one in found.saved for timed in one.contenders}


def test_the_last_of_two_gpus_ends_the_run_alone(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """What waited to be confirmed by one that is gone ends with what there is."""
    gpus = {"a": Fake(listed), "b": Fake(listed, dies=[4])}
    found = run(listed, tmp_path, gpus, confirms=True)
    assert found.picks == local.picks
    assert [one.status for one in found.ended] == ["tuned"] * 3

"""A run on GPUs that die, hang, vanish, come back and lie ends as on one that does not."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import KIND, Clock, Fake, Hanging, Results, Run, anchor_of, run
from sweeps import default_of, swept_seconds

from warploom.errors import DeviceError
from warploom.generator.specification import KernelSpec
from warploom.tuning.fleet import members
from warploom.tuning.fleet.actor import Hello
from warploom.tuning.fleet.agreement import agreed
from warploom.tuning.fleet.gpus import RayGpu
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import About, Batch
from warploom.tuning.journal import Result
from warploom.tuning.problems import Problem
from warploom.tuning.search import Search
from warploom.tuning.tuner import FINAL_PRECISION, PRECISION, SETS


@pytest.fixture(scope="module")
def local(listed: list[Problem], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What one GPU of this host finds."""
    return run(listed, tmp_path_factory.mktemp("local"), {"0": Fake(listed)})


def measured(of: Run) -> Counter[object]:
    return Counter((one.operation, one.shape, one.result) for one in of.journal)


# ---- Who fails -----------------------------------------------------------------------------------


def test_fifty_deaths_change_no_pick_and_count_nothing_twice(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """Two names die at random batches, and others come in their places."""
    fate, joined = random.Random(3), []

    def joining() -> Mapping[str, Fake]:
        alive = [one for one in joined if not one.closed]
        if len(alive) == 2:
            return {}
        dies = [fate.choice((1,) * 9 + (2,))] if len(joined) < 50 else []
        joined.append(Fake(listed, dies=dies))
        return {f"node{len(joined)}/0": joined[-1]}

    found = run(listed, tmp_path, {}, joining=joining, failures=members.FAILURES)
    assert sum("the actor died" in said for said in found.said) >= 49
    assert found.picks == local.picks
    assert measured(found) == measured(local)


def test_a_gpu_that_comes_back_is_used_until_it_has_failed_twice(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    lives = [Fake(listed, dies=[2]), Fake(listed, dies=[3]), Fake(listed)]
    left = [*lives]

    def joining() -> Mapping[str, Fake]:
        return {"node1/0": left.pop(0)} if left else {}

    steady = {"node2/0": Fake(listed)}
    found = run(listed, tmp_path, steady, joining=joining, failures=members.FAILURES)
    tried = [len(one.batches) for one in lives]
    assert tried[2] == 0 and lives[2].closed
    if tried[:2] == [2, 3]:  # the other may have been faster
        assert "it is used again if it comes back" in found.said[0]
        assert "it is not used again" in found.said[1]
    assert found.picks == local.picks


def test_what_a_hanging_gpu_was_at_goes_to_one_that_joined_and_counts_once(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    clock = Clock()
    hanging, late = Hanging(listed, clock), [Fake(listed)]

    def joining() -> Mapping[str, Fake]:
        return {"late": late.pop()} if late and hanging.closed else {}

    found = run(listed, tmp_path, {"first": hanging}, joining=joining, clock=clock)
    assert "GPU first: no result for 600 seconds" in found.said[0]
    assert found.picks == local.picks and measured(found) == measured(local)


def test_one_that_answers_for_half_of_a_batch_gives_it_back(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    def half(batch: Batch, found: Results) -> Results:
        return dict([*found.items()][: len(found) // 2])

    gpus = {"half": Fake(listed, lies=half), "whole": Fake(listed)}
    found = run(listed, tmp_path, gpus)
    assert "no result of" in found.said[0]
    assert found.picks == local.picks and measured(found) == measured(local)


def test_a_fleet_that_has_lost_everyone_waits_for_others_and_then_ends_with_the_reason(
    listed: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "AWAITED", -1.0)
    with pytest.raises(DeviceError, match="the actor died"):
        run(listed, tmp_path, {"0": Fake(listed, dies=[1])}, joining=dict)
    with pytest.raises(DeviceError, match="no NVIDIA H200 has joined"):
        run(listed, tmp_path, {}, joining=dict)


# ---- Whom to believe -----------------------------------------------------------------------------

OFF = {
    "slow": ({"takes": 1.05}, r"takes \d+\.\d us on it, 4\.0% longer"),
    "fast": ({"takes": 0.7}, r"takes \d+\.\d us on it, 30\.0% shorter"),
    "throttled": ({"condition": Condition("580.1", slowed="hot")}, "held down: hot"),
    "shared": ({"condition": Condition("580.1", others=2)}, "other processes use it: 2"),
    "driver": ({"condition": Condition("570.2")}, "driver 570.2, the others have 580.1"),
}


@pytest.mark.parametrize("fault", OFF)
def test_a_gpu_that_is_not_like_its_kind_is_refused_by_name(
    listed: list[Problem], local: Run, tmp_path: Path, fault: str
) -> None:
    keywords, message = OFF[fault]
    gpus = {"node1/3": Fake(listed, **keywords), "a": Fake(listed), "b": Fake(listed, takes=1.01)}
    found = run(listed, tmp_path, gpus, anchor=anchor_of(listed[0]))
    (said,) = found.said
    assert said.startswith("GPU node1/3 is refused: ")
    assert len(gpus["node1/3"].batches) == 2  # two examinations, and no work
    assert re.search(message, said), said
    assert found.picks == local.picks


def test_one_whose_anchor_is_wrong_is_refused(listed: list[Problem], tmp_path: Path) -> None:
    def wrong(batch: Batch, found: Results) -> Results:
        return {spec: Result(spec.schedule, "wrong", reason="an error") for spec in found}

    gpus = {"bad": Fake(listed, lies=wrong), "good": Fake(listed)}
    found = run(listed, tmp_path, gpus, anchor=anchor_of(listed[0]))
    assert "a kernel that is right on others ended as wrong: an error" in found.said[0]
    assert found.alarms == []


def test_one_that_lies_does_not_become_the_rule_when_others_are_lost(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """Of two that are left, who says that all takes less was believed."""
    gpus = {
        "lying": Fake(listed, takes=0.7),
        "lost": Fake(listed, dies=[2]),
        "good": Fake(listed),
    }
    found = run(listed, tmp_path, gpus, anchor=anchor_of(listed[0]))
    assert any("GPU lying is refused" in said for said in found.said)
    assert not any("GPU good" in said for said in found.said)
    assert found.picks == local.picks


def test_one_that_becomes_slow_is_refused_in_the_middle(
    listed: list[Problem], local: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "EVERY", 2)
    slowing = Fake(listed)

    def slow(batch: Batch, found: Results) -> Results:
        slowing.takes = 1.2 if len(slowing.batches) > 2 else 1.0
        return found

    slowing.lies = slow
    gpus = {"slowing": slowing, "a": Fake(listed), "b": Fake(listed)}
    found = run(listed, tmp_path, gpus, anchor=anchor_of(listed[0]))
    assert found.picks == local.picks
    assert all("GPU slowing is refused" in said for said in found.said)


def test_one_of_another_kind_is_refused(listed: list[Problem], tmp_path: Path) -> None:
    other = Fake(listed, kind=About("NVIDIA H100 80GB HBM3", 132))
    found = run(listed, tmp_path, {"other": other, "own": Fake(listed)})
    assert found.said == [
        "GPU other is refused: it has an NVIDIA H100 80GB HBM3 with 132 multiprocessors, and the "
        "run is for an NVIDIA H200 with 132"
    ]
    assert other.closed and not other.batches


def test_a_gpu_on_which_nothing_works_is_not_believed_about_a_problem(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """Nothing was examined here: another GPU finds kernels right that this one calls wrong."""

    def wrong(batch: Batch, found: Results) -> Results:
        return {spec: Result(spec.schedule, "wrong", reason="a lie") for spec in found}

    gpus = {"liar": Fake(listed, lies=wrong), "a": Fake(listed), "b": Fake(listed)}
    found = run(listed, tmp_path, gpus, confirms=True)
    assert found.picks == local.picks and found.alarms == []
    assert [said.split(":")[0] for said in found.said] in ([], ["GPU liar"])


# ---- Kernels on their way ------------------------------------------------------------------------


class Sent(Fake):
    """A GPU of a cluster: what it measures has to be sent to it, and its first batch takes long."""

    def __init__(self, listed: Sequence[Problem]) -> None:
        super().__init__(listed)
        self.prepared: list[Batch] = []
        self.asked = Event()

    def prepare(self, batch: Batch) -> None:
        self.prepared.append(batch)
        self.asked.set()

    def measure(self, batch: Batch) -> Results:
        assert self.asked.wait(60)
        return super().measure(batch)


def test_kernels_are_sent_to_a_gpu_while_it_measures_others(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """A GPU waited for them before every batch, for as long as it took to measure that."""
    gpu = Sent(listed)
    found = run(listed, tmp_path, {"a": gpu})
    assert found.picks == local.picks
    assert gpu.prepared[0] == gpu.batches[1]
    assert len({id(batch) for batch in gpu.prepared}) == len(gpu.prepared)  # each is asked for once


class Remote:
    """What an actor has been asked, in order; nothing is done before somebody waits for it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*given: Any) -> tuple[str, Any]:
            self.asked.append(f"{name} {len(given)}")
            return name, given

        return SimpleNamespace(remote=remote)

    def answer(self, call: tuple[str, Any], stopped: object) -> object:
        name, given = call
        self.asked.append(f"waited for {name}")
        return (given[0], {}) if name == "measure" else None


def test_a_kernel_is_sent_once_and_is_there_before_it_is_measured(listed: list[Problem]) -> None:
    actor = Remote()
    joining: Any = SimpleNamespace(sent=list, cluster=actor)
    gpu = RayGpu(joining, actor, Hello("a", "node", KIND, "", ""))
    specs = listed[0].space[:4]
    first, second = (
        Batch(listed[0].operation, listed[0].shape, some, PRECISION, SETS)
        for some in (specs[:3], specs[1:])
    )
    gpu.measure(first)
    gpu.prepare(second)
    assert actor.asked == ["hold 3", "waited for hold", "measure 2", "waited for measure", "hold 1"]
    del actor.asked[:]
    gpu.measure(second)
    assert "hold 1" not in actor.asked
    assert actor.asked[-3:] == ["waited for hold", "measure 2", "waited for measure"]


# ---- Finalists -----------------------------------------------------------------------------------


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

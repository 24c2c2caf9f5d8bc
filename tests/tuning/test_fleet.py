"""A run on GPUs that die, hang, vanish, come back and lie ends as on one that does not."""

from __future__ import annotations

import math
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

from warploom.errors import DeviceError
from warploom.tuning.fleet import members
from warploom.tuning.fleet.actor import Hello
from warploom.tuning.fleet.gpus import RayGpu
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import About, Batch
from warploom.tuning.journal import Result
from warploom.tuning.problems import Problem
from warploom.tuning.tuner import PRECISION, SETS


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


def raising(batch: Batch, found: Results) -> Results:
    raise RuntimeError("no such thing")


def each(**fields: Any) -> Callable[[Batch, Results], Results]:
    """What changes these fields of all results."""
    return lambda batch, found: {spec: replace(one, **fields) for spec, one in found.items()}


GARBAGE: dict[str, Any] = {
    "None": lambda batch, found: None,
    "a list": lambda batch, found: [1],
    "words": lambda batch, found: dict.fromkeys(found, "correct"),
    "times of NaN": each(seconds=math.nan),
    "relative times of NaN": each(relative=math.nan),
    "negative times": each(seconds=-1.0),
    "no times": each(seconds=None),
    "another outcome": each(outcome="fine"),
    "no schedules": each(schedule=None),
    "an exception": raising,
}


@pytest.mark.parametrize("examined", [False, True])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_answer_that_is_none_is_a_failure_of_its_gpu(
    garbage: str, examined: bool, listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """None had the batch measured for ever; others ended the run, or became the record."""
    options = {"anchor": anchor_of(listed[0])} if examined else {}
    gpus = {"bad": Fake(listed, lies=GARBAGE[garbage]), "good": Fake(listed)}
    found = run(listed, tmp_path, gpus, **options)
    (said,) = found.said
    assert said.startswith("GPU bad: ") and gpus["bad"].closed
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


@pytest.mark.parametrize("says", [None, 3, Condition(driver=None), Condition(others="2")])  # type: ignore[arg-type]
def test_a_condition_that_is_none_is_a_failure_of_its_gpu(
    says: Condition, listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    gpus = {"bad": Fake(listed), "good": Fake(listed)}
    gpus["bad"].says = says
    found = run(listed, tmp_path, gpus, anchor=anchor_of(listed[0]))
    assert [said.startswith("GPU bad: ") for said in found.said] == [True]
    assert found.picks == local.picks


def test_a_fleet_that_has_lost_everyone_waits_for_others_and_then_ends_with_the_reason(
    listed: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "AWAITED", -1.0)
    with pytest.raises(DeviceError, match="the actor died"):
        run(listed, tmp_path, {"0": Fake(listed, dies=[1])}, joining=dict)
    with pytest.raises(DeviceError, match="no NVIDIA H200 has joined"):
        run(listed, tmp_path, {}, joining=dict)


def test_a_run_goes_on_with_the_gpus_it_has_where_their_cluster_does_not_answer(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """A head that went away ended the run, and what its GPUs had just measured was lost."""
    asked: list[object] = []

    def joining() -> Mapping[str, Fake]:
        asked.append(None)
        raise DeviceError("the Ray cluster: no answer")

    found = run(listed, tmp_path, {"0": Fake(listed)}, joining=joining)
    assert found.picks == local.picks and measured(found) == measured(local)
    assert [said.split(";")[0] for said in found.said] == ["the Ray cluster: no answer"]
    assert len(asked) == 1  # each question may take a minute


def test_a_run_without_gpus_whose_cluster_does_not_answer_ends_with_that(
    listed: list[Problem], tmp_path: Path
) -> None:
    clock = Clock()

    def joining() -> Mapping[str, Fake]:
        raise DeviceError("the Ray cluster: no answer")

    def waiting() -> float:
        clock.now += 10.0
        return clock()

    with pytest.raises(DeviceError, match="the Ray cluster: no answer"):
        run(listed, tmp_path, {}, joining=joining, clock=waiting)


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


def test_a_node_without_nvidia_smi_has_no_other_driver(
    listed: list[Problem], local: Run, tmp_path: Path
) -> None:
    """It was refused: "it has driver , the others have 580.1"."""
    gpus = {"silent": Fake(listed, condition=Condition()), "a": Fake(listed), "b": Fake(listed)}
    found = run(listed, tmp_path, gpus, anchor=anchor_of(listed[0]))
    assert found.said == [] and found.picks == local.picks
    gpus = {name: Fake(listed, condition=Condition()) for name in "ab"}
    found = run(listed, tmp_path / "all", gpus, anchor=anchor_of(listed[0]))
    assert found.said == []


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
        assert self.asked.wait(600)
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

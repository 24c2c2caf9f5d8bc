"""The fastest of a few kernels within a budget: on times that are made up, and on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from autotuned import GPU

from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import trial
from warploom.runtime.elements import TORCH
from warploom.runtime.families import family
from warploom.runtime.trial import difference_share, exactly, sets_for
from warploom.tuning.autotune import contest
from warploom.tuning.autotune.candidates import COUNT, TAILORED, candidates
from warploom.tuning.autotune.contest import Contest, Measured, NotMeasured, Turn
from warploom.tuning.autotune.stage import rehearse_on
from warploom.tuning.problems import likeliest

OPERATION, SHAPE = GemmOperation("bf16", "bf16", "bf16"), GemmShape(96, 640, 512, 1)
SPECS = likeliest(OPERATION, SHAPE, GPU, 16)
PRESENT, *OTHERS = SPECS


class FakeStage:
    """A GPU on which a kernel takes what `seconds` says; it keeps the order of launches."""

    def __init__(self, seconds: dict[KernelSpec, float]) -> None:
        self.seconds = seconds
        self.laps: list[list[KernelSpec]] = []

    def calls(self, spec: KernelSpec) -> list[Callable[[], Any]]:
        return [lambda: spec] * 4

    def lap(self, turns: Sequence[Turn]) -> tuple[list[float], float]:
        ran = [turn.call() for turn in turns]
        assert all(isinstance(spec, KernelSpec) for spec in ran)
        self.laps.append(ran)  # type: ignore[arg-type]
        found = [self.seconds[spec] for spec in ran]  # type: ignore[index]
        return found, sum(found) + sum(turn.pause for turn in turns)

    def timed(self, act: Callable[[], Any]) -> tuple[Any, float]:
        return act(), 0.0

    def launched(self, call: Callable[[], Any]) -> float:
        return self.seconds[call()]


class StallingStage(FakeStage):
    """A GPU on which one step, of launches, rounds and comparisons, takes 400 ms."""

    def __init__(self, seconds: dict[KernelSpec, float], stalling: int) -> None:
        super().__init__(seconds)
        self.stalling = stalling
        self.steps: list[str] = []

    def step(self, name: str) -> float:
        self.steps.append(name)
        return 0.4 if len(self.steps) - 1 == self.stalling else 0.0

    def lap(self, turns: Sequence[Turn]) -> tuple[list[float], float]:
        stall = self.step("round")
        found, spent = super().lap(turns)
        return found, spent + stall

    def timed(self, act: Callable[[], Any]) -> tuple[Any, float]:
        return act(), self.step("comparison")

    def launched(self, call: Callable[[], Any]) -> float:
        return super().launched(call) + self.step("launch")


def run(
    seconds: dict[KernelSpec, float],
    *,
    budget: float = 0.05,
    differs: Callable[[KernelSpec], float] = lambda spec: 0.0,
    kept: Sequence[KernelSpec] = (),
) -> tuple[Measured, FakeStage]:
    stage = FakeStage(seconds)
    made = Contest(PRESENT, kept, stage.calls, differs, stage, budget)
    return made.run(SPECS), stage


def times(usual: float) -> dict[KernelSpec, float]:
    return dict.fromkeys(SPECS, usual)


def test_the_fastest_wins_and_what_is_far_behind_leaves_after_two_rounds() -> None:
    seconds = times(4e-5) | {OTHERS[2]: 2e-5, OTHERS[3]: 2.1e-5}
    found, _ = run(seconds, kept=[OTHERS[0]])
    assert found.winner == OTHERS[2]
    assert {*found.timings} == {PRESENT, *OTHERS[:1], *OTHERS[2:4]}
    assert all(len(timing.rounds) == contest.ROUNDS for timing in found.timings.values())
    assert found.timings[OTHERS[2]].median == 2e-5
    assert 0 < found.spent < 0.05


@pytest.mark.parametrize(("gain", "stays"), [(0.015, True), (0.025, False)])
def test_within_two_percent_the_present_kernel_stays(gain: float, stays: bool) -> None:
    found, _ = run(times(4e-5) | {OTHERS[2]: 4e-5 * (1 - gain)})
    assert (found.winner == PRESENT) == stays


def test_a_kernel_with_a_wrong_result_never_wins() -> None:
    seconds = times(4e-5) | {OTHERS[0]: 1e-5, OTHERS[1]: 2e-5}
    found, _ = run(seconds, differs=lambda spec: 3.0 if spec == OTHERS[0] else 0.9)
    assert found.winner == OTHERS[1] and OTHERS[0] not in found.timings
    assert found.failed[OTHERS[0]].startswith("WRONG RESULT: off by 3 times")


def test_a_kernel_that_cannot_be_launched_is_left_out() -> None:
    stage = FakeStage(times(4e-5) | {OTHERS[1]: 3e-5})

    def calls(spec: KernelSpec) -> list[Callable[[], Any]]:
        if spec == OTHERS[0]:
            raise RuntimeError("too much shared memory\nat a place")
        return stage.calls(spec)

    found = Contest(PRESENT, (), calls, lambda spec: 0.0, stage, 0.05).run(SPECS)
    assert found.winner == OTHERS[1]
    assert found.failed == {OTHERS[0]: "too much shared memory"}


def test_a_small_budget_measures_fewer_and_is_kept() -> None:
    seconds = times(1e-3) | {OTHERS[0]: 0.9e-3}
    all_of_them, _ = run(seconds, budget=1.0)
    some, _ = run(seconds, budget=0.05)
    assert some.spent <= 0.05 < all_of_them.spent
    assert some.winner == OTHERS[0]
    assert all(len(timing.rounds) >= contest.FEWEST for timing in some.timings.values())


def test_what_does_not_fit_the_budget_is_not_measured() -> None:
    with pytest.raises(NotMeasured, match="50 ms of GPU time do not suffice"):
        run(times(0.02))


def test_launches_of_five_milliseconds_are_compared() -> None:
    """Each was begun twice and three rounds were wanted: nothing was left to compare with."""
    seconds = times(5e-3) | {OTHERS[1]: 4.6e-3}
    found, stage = run(seconds, differs=lambda spec: 0.0)
    assert found.winner == OTHERS[1] and found.spent <= 0.05
    assert all(len(timing.rounds) >= contest.SCREENED for timing in found.timings.values())
    assert len(stage.laps) == len(found.timings[PRESENT].rounds)  # nothing but rounds
    with pytest.raises(NotMeasured, match=r"do not suffice, where a launch takes 12\.0"):
        run(times(12e-3))


@pytest.mark.parametrize("usual", [1e-4, 4e-4, 1.3e-3, 3e-3])
def test_there_is_time_left_to_compare_the_results_of_the_fastest(usual: float) -> None:
    """Rounds took all of it: a kernel that was 7 % faster was never compared, and never ran."""

    class Comparing(FakeStage):
        def timed(self, act: Callable[[], Any]) -> tuple[Any, float]:
            return act(), 0.006 + usual

    stage = Comparing(times(usual) | {OTHERS[0]: 0.9 * usual})
    made = Contest(PRESENT, (), stage.calls, lambda _: 0.0, stage, 0.05, compared=0.006)
    found = made.run(SPECS)
    assert found.winner == OTHERS[0] and found.spent <= 0.055


def test_what_could_not_be_compared_is_not_told_to_be_slower() -> None:
    """The present kernel was recorded as the fastest, and never was the problem tuned again."""
    rounds = [at for at, name in enumerate(stalled(-1)[1].steps) if name == "round"]
    last = rounds[len(SPECS) + contest.SCREENED - 1]  # each was begun by a round of its own
    assert stalled(last)[0] is None


def stalled(at: int) -> tuple[Measured | None, StallingStage]:
    stage = StallingStage(times(4e-5) | {OTHERS[2]: 2e-5}, at)
    try:
        return Contest(PRESENT, (), stage.calls, lambda _: 0.0, stage, 0.05).run(SPECS), stage
    except NotMeasured as error:
        assert str(error) == "50 ms of GPU time do not suffice"
        return None, stage


def test_nothing_is_launched_after_a_first_launch_that_takes_the_whole_budget() -> None:
    found, stage = stalled(0)
    assert found is None and stage.steps == ["launch"]


def test_one_step_at_most_exceeds_the_budget_and_what_was_found_is_kept() -> None:
    """A comparison whose kernels had to be loaded was followed by rounds: 435 ms instead of 50."""
    _, usual = stalled(-1)
    for at, name in enumerate(usual.steps):
        found, stage = stalled(at)
        assert stage.steps == usual.steps[: at + 1]
        if name == "comparison":
            assert found is not None and found.winner == OTHERS[2]


def test_candidates_are_few_legal_and_begin_with_what_is_given() -> None:
    """What comes first is of the table: of a space the model takes what it is too kind to."""
    given = likeliest(OPERATION, SHAPE, GPU, 8)
    found = candidates(OPERATION, SHAPE, GPU, given)
    assert len(given) == 8 and found[:8] == given and len(found) == 8 + COUNT + TAILORED
    assert len({replace(spec.schedule, l2_promotion=256) for spec in found[8:16]}) == COUNT
    assert len({*found}) == len(found)
    across = candidates(GemmOperation("bf16", "bf16", "fp32", "col", "row"), SHAPE, GPU)
    assert COUNT < len(across) <= COUNT + TAILORED
    assert {spec.operation.layout_a for spec in across} == {"col"}


# ---- What is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_roundings_pass_and_a_lost_step_of_k_does_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    m, n, k = 64, 96, 16384
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    exact = a.double() @ b.double()
    kept = exact.to(dtype)
    other = (exact * (1 + 2**-12 * torch.randn(m, n).double().clamp(-1, 1))).to(dtype)
    assert difference_share(other, kept) <= 1
    lost = (a[:, 64:].double() @ b[64:].double()).to(dtype)
    assert difference_share(lost, kept) > 1
    kept[0, 0], other[0, 0] = torch.nan, torch.nan
    assert difference_share(other, kept) == torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_value_that_is_not_finite_is_found_in_every_chunk(
    dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's max of a number and NaN is the number, if that comes first."""
    monkeypatch.setattr(trial, "_CHUNK", 16)
    kept = torch.linspace(1, 2, 64)
    assert difference_share(kept.to(dtype), kept.to(dtype)) == 0
    for at in (0, 20, 63):
        found = kept.clone()
        found[at] = value
        assert difference_share(found.to(dtype), kept.to(dtype)) > 1


def test_integers_are_equal_or_rounded_apart() -> None:
    one = torch.arange(8)
    assert difference_share(one.int(), one.int()) == 0
    assert difference_share((one + 1).int(), one.int()) == torch.inf
    assert difference_share((one + 1).to(torch.int8), one.to(torch.int8)) == 1
    assert difference_share((one + 2).to(torch.int8), one.to(torch.int8)) == 2
    assert difference_share(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.parametrize("element", [*TORCH])
def test_every_type_can_be_rehearsed_before_a_call_measures(element: str) -> None:
    rehearse_on(TORCH[element], "cpu")


@pytest.mark.parametrize("name", ["gemm", "attention_forward", "attention_backward"])
def test_every_trial_has_the_results_that_calls_write(name: str) -> None:
    shapes: dict[str, tuple[Any, Any]] = {"gemm": (OPERATION, SHAPE)}
    if name not in shapes:
        from warploom.generator.families._attention import AttentionShape
        from warploom.generator.families.attention_backward import AttentionBackwardOperation
        from warploom.generator.families.attention_forward import AttentionOperation

        kind = AttentionOperation if name.endswith("forward") else AttentionBackwardOperation
        shapes[name] = kind("bf16", 64), AttentionShape(1, 2, 2, 70, 70, 64)
    operation, shape = shapes[name]
    trial = family(name).trial(operation, shape, "cpu", 1)
    (spec, *_) = candidates(operation, shape, GPU)
    for one in trial.results:
        one.fill_(torch.nan)
    trial.calls(spec)[0]()
    assert all(one.isfinite().all() for one in trial.results)


def test_a_trial_takes_as_many_sets_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    with exactly(2):
        assert sets_for(1, "cuda") == 2
        with exactly(1):
            assert sets_for(1, "cuda") == 1
        assert (sets_for(1, "cuda"), sets_for(1, "cpu")) == (2, 1)

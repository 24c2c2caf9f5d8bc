"""The search: what is measured next, who wins among equals, and what it does where kernels fail."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from sweeps import MULTIPROCESSORS, default_of, swept_seconds

from warploom.generator.model import Prediction, rank
from warploom.generator.model.predict import preference
from warploom.generator.specification import KernelSpec
from warploom.tuning.fleet.agreement import agreed
from warploom.tuning.journal import Outcome, Result
from warploom.tuning.problems import Problem
from warploom.tuning.search import FINALISTS, FIRST, TIE, WIDEST_TIE, Search, band
from warploom.tuning.steps import Steps

Seconds = Callable[[KernelSpec], float]


def ranked(problem: Problem) -> list[Prediction]:
    return rank(None, problem.space, problem.shape, MULTIPROCESSORS)


def measure(
    batch: list[KernelSpec], seconds: Seconds, failing: dict[KernelSpec, Outcome] | None = None
) -> dict[KernelSpec, Result]:
    """Results as a GPU gives them: relative to the first that is correct."""
    failing = failing or {}
    anchor = next((seconds(spec) for spec in batch if spec not in failing), None)
    return {
        spec: Result(spec.schedule, failing[spec], reason="broken")
        if spec in failing
        else Result(spec.schedule, "correct", seconds(spec), 0.002, seconds(spec) / (anchor or 1))
        for spec in batch
    }


def run(search: Search, seconds: Seconds, failing: dict[KernelSpec, Outcome] | None = None) -> int:
    """Run a search to its end; return how many kernels it measured before its finalists."""
    for _ in range(50):
        batch = search.wanted()
        if not batch:
            return len(search.results)
        assert len(batch) == len(set(batch)) <= 2 + FIRST
        search.report(measure(batch, seconds, failing))
    raise AssertionError("the search does not end")


def test_the_first_batch_is_the_default_and_the_models_choices(listed: list[Problem]) -> None:
    problem = listed[1]
    default, hint = default_of(problem), problem.space[-1]
    batch = Search(default, ranked(problem), [hint]).wanted()
    assert batch[:2] == [default, hint]
    assert len(batch) == 1 + FIRST


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_search_finds_what_is_within_two_percent_of_the_best(
    listed: list[Problem], index: int
) -> None:
    problem = listed[index]
    search = Search(default_of(problem), ranked(problem))

    def seconds(spec: KernelSpec) -> float:
        return swept_seconds(problem, spec, 0.03)

    tried = run(search, seconds)
    best = min(map(seconds, problem.space))
    winner = search.winner()
    assert winner and seconds(winner) <= 1.02 * best
    assert tried <= len(problem.space) + 1


def test_neighbours_are_what_the_model_did_not_propose(listed: list[Problem]) -> None:
    problem = listed[2]
    search = Search(default_of(problem), ranked(problem))
    first, steps = search.wanted(), Steps(problem.space)
    hidden, path = next(  # two steps away from what the model thinks of
        (spec, one)
        for spec in problem.space
        for one in problem.space
        if one not in first
        and not any(steps.adjacent(spec, known) for known in first)
        and steps.adjacent(spec, one)
        and any(steps.adjacent(one, known) for known in first)
    )
    begin = next(known for known in first if steps.adjacent(path, known))
    times = {hidden: 0.5, path: 0.6, begin: 0.7}
    run(search, lambda spec: times.get(spec, 1.0))
    assert search.winner() == hidden


def test_steps_are_of_one_field_whatever_follows_from_it(listed: list[Problem]) -> None:
    problem = listed[0]
    steps = Steps(problem.space)
    by_tile = {
        (s.schedule.tile, s.schedule.cluster, s.schedule.kernel_schedule): s for s in problem.space
    }  # type: ignore[attr-defined]
    one = by_tile[(128, 128, 64), (2, 1), "pingpong"]
    assert steps.adjacent(one, by_tile[(128, 160, 64), (2, 1), "pingpong"])  # with other stages
    assert steps.adjacent(one, by_tile[(128, 128, 64), (1, 1), "pingpong"])
    assert not steps.adjacent(one, by_tile[(128, 160, 64), (1, 1), "pingpong"])
    assert not steps.adjacent(one, by_tile[(64, 32, 64), (2, 1), "pingpong"])
    assert not steps.adjacent(one, one)


def test_exhaustive_measures_every_point_in_bounded_batches(listed: list[Problem]) -> None:
    problem = listed[0]
    search = Search(default_of(problem), ranked(problem), exhaustive=True)
    run(search, lambda spec: swept_seconds(problem, spec))
    assert set(search.results) == {*problem.space, default_of(problem)}


def test_what_is_known_is_not_measured_again(listed: list[Problem]) -> None:
    problem = listed[1]

    def seconds(spec: KernelSpec) -> float:
        return swept_seconds(problem, spec)

    whole = Search(default_of(problem), ranked(problem))
    run(whole, seconds)
    known = [*whole.results.values()]
    resumed = Search(default_of(problem), ranked(problem), known=known)
    batch = resumed.wanted()
    assert resumed.stage == "final" and 2 <= len(batch) <= 1 + FINALISTS
    resumed.report(measure(batch, seconds))
    assert resumed.winner() == whole.winner()


def test_times_relative_to_another_default_are_measured_again(listed: list[Problem]) -> None:
    problem = listed[1]
    whole = Search(default_of(problem), ranked(problem))
    run(whole, lambda spec: swept_seconds(problem, spec), {problem.space[0]: "timeout"})
    other = next(
        spec for spec in problem.space if spec not in (default_of(problem), problem.space[0])
    )
    resumed = Search(other, ranked(problem), known=whole.results.values())
    assert {found.outcome for found in resumed.results.values()} <= {"timeout"}
    assert resumed.wanted()[0] == other


def test_a_family_without_a_model_is_searched_in_a_fixed_order(listed: list[Problem]) -> None:
    problem = listed[1]
    unknown = sorted(
        (Prediction(spec, math.inf) for spec in problem.space), key=lambda one: preference(one.spec)
    )
    batch = Search(default_of(problem), unknown).wanted()
    assert len(set(batch) - {default_of(problem)}) >= FIRST - 1


# ---- Ties ----------------------------------------------------------------------------------------


def finished(problem: Problem, times: dict[KernelSpec, float], error: float = 0.0) -> Search:
    """A search whose last loop measured these times, relative to the default."""
    search = Search(default_of(problem), ranked(problem))
    search.stage = "final"
    search.report(
        {
            spec: Result(spec.schedule, "correct", time * 1e-5, 0.1, time, error)
            for spec, time in times.items()
        }
    )
    return search


def test_the_default_wins_where_nothing_is_faster_than_noise(listed: list[Problem]) -> None:
    problem = listed[0]
    default = default_of(problem)
    other = next(spec for spec in problem.space if spec != default)
    assert finished(problem, {default: 1.0, other: 0.995}).winner() == default
    assert finished(problem, {default: 1.0, other: 0.98}).winner() == other
    assert finished(problem, {default: 1.0, other: 0.98}, error=0.02).winner() == default
    # Noise hides no more than a bound.
    assert finished(problem, {default: 1.0, other: 0.95}, error=0.2).winner() == other


def test_ties_have_a_fixed_order_whatever_the_order_of_times(listed: list[Problem]) -> None:
    problem = listed[2]
    default = default_of(problem)
    tied = [spec for spec in problem.space if spec != default][:4]
    expected = min(tied, key=preference)
    source = random.Random(1)
    for _ in range(20):
        times = {spec: 0.8 * (1 + 0.008 * source.random()) for spec in tied}
        noisy = finished(problem, {default: 1.0, **times}, error=0.006)
        assert noisy.winner() == expected
        # What is known to be faster is not given up for being usual.
        assert finished(problem, {default: 1.0, **times}).winner() == min(tied, key=times.get)


def test_the_band_is_what_errors_hide_within_bounds() -> None:
    def result(spread: float, error: float) -> Result:
        return Result(None, "correct", 1.0, spread, 1.0, error)  # type: ignore[arg-type]

    assert band(result(0.0, 0.0), result(0.0, 0.0)) == TIE
    assert band(result(0.5, 0.012), result(0.5, 0.016)) == pytest.approx(0.02)
    assert band(result(0.0, 0.2), result(0.0, 0.0)) == WIDEST_TIE


def test_a_second_opinion_is_asked_of_those_that_could_win(listed: list[Problem]) -> None:
    default = default_of(listed[0])
    near, far, broken, *_ = (spec for spec in listed[0].space if spec != default)
    first = {
        default: Result(default.schedule, "correct", 1e-5, 0.1, 1.0, 0.003),
        broken: Result(broken.schedule, "wrong", reason="as the test has it"),
        near: Result(near.schedule, "correct", 0.9e-5, 0.1, 0.9, 0.003),
        far: Result(far.schedule, "correct", 0.93e-5, 0.1, 0.93, 0.003),
    }
    search = finished(listed[0], {})
    assert search.rivals(first) == [default, near]
    second = {spec: replace(first[spec], relative=1.0) for spec in (default, near)}
    found = agreed(first, second)
    assert {spec: (one.outcome, one.relative) for spec, one in found.items()} == {
        default: ("correct", 1.0),
        broken: ("wrong", None),
        near: ("correct", 1.0),
        far: ("correct", 0.93),
    }
    assert search.rivals(found) == [default, far]  # of whom one GPU alone has told


# ---- Failures ------------------------------------------------------------------------------------


def test_wrong_and_broken_kernels_never_win(listed: list[Problem]) -> None:
    problem = listed[1]
    first = ranked(problem)[0].spec
    outcomes: tuple[Outcome, ...] = (
        *("wrong", "compile error", "launch error"),
        *("timeout", "illegal"),
    )
    for outcome in outcomes:
        search = Search(default_of(problem), ranked(problem))
        run(search, lambda spec: 0.1 if spec == first else 1.0, {first: outcome})
        assert search.results[first].outcome == outcome
        assert search.winner() not in (first, None)
        assert first not in search.contenders()


def test_a_default_that_fails_is_replaced_as_anchor_and_not_recorded(listed: list[Problem]) -> None:
    problem = listed[1]
    default = default_of(problem)
    search = Search(default, ranked(problem))
    run(search, lambda spec: swept_seconds(problem, spec), {default: "illegal"})
    assert search.stage == "done" and search.winner() not in (default, None)
    timed = search.timed()
    assert timed and timed[1] is None and timed[0].seconds > 0


def test_a_problem_on_which_all_fail_ends_without_a_winner(listed: list[Problem]) -> None:
    problem = listed[0]
    search = Search(default_of(problem), ranked(problem))
    everything: dict[KernelSpec, Outcome] = dict.fromkeys(
        (*problem.space, default_of(problem)), "launch error"
    )
    assert run(search, lambda spec: 1.0, everything) <= len(everything)
    assert search.winner() is None and search.timed() is None


def test_a_winner_that_is_wrong_on_the_last_data_is_none(listed: list[Problem]) -> None:
    problem = listed[1]
    search = Search(default_of(problem), ranked(problem))
    default = default_of(problem)
    fast = next(spec for spec in search.wanted() if spec != default)

    def seconds(spec: KernelSpec) -> float:
        return 0.5 if spec == fast else 1.0

    while search.stage != "final":
        batch = search.wanted()
        if search.stage != "final":
            search.report(measure(batch, seconds))
    assert fast in batch
    search.report(measure(batch, seconds, {fast: "wrong"}))
    assert search.winner() not in (fast, None)
    assert search.results[fast].outcome == "wrong"


def test_without_time_to_explore_the_best_known_are_the_finalists(listed: list[Problem]) -> None:
    problem = listed[1]
    search = Search(default_of(problem), ranked(problem))
    first = search.wanted(explore=False)
    assert first[0] == search.default and len(first) >= FIRST  # nothing is known yet
    search.report(measure(first, lambda spec: swept_seconds(problem, spec)))
    assert search.stage == "first"
    finalists = search.wanted(explore=False)
    assert search.stage == "final" and len(finalists) <= 1 + FINALISTS


def test_times_are_relative_ones_times_the_anchors(listed: list[Problem]) -> None:
    problem = listed[0]
    default = default_of(problem)
    other = next(spec for spec in problem.space if spec != default)
    search = finished(problem, {default: 1.0, other: 0.9})
    drifted = replace(search.finals[other], seconds=5.0)  # clocks fell while it was timed
    search.finals[other] = drifted
    timed = search.timed()
    assert timed and timed[0].seconds == pytest.approx(0.9e-5)

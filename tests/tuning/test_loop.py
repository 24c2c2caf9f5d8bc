"""Loops over kernels: what clocks do to all, what noise does to each, and when enough is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import hypot, sqrt
from statistics import mean, pstdev

import pytest

from warploom.runtime.measure import Sampler, Timing
from warploom.tuning import loop as loops
from warploom.tuning.loop import BETWEEN, DISCARDED, FEWEST, LONGEST, MOST, Loop


def loop(samplers: Mapping[str, Sampler], precision: float) -> Loop:
    """A loop that takes no time: on a busy machine it would end before all is known."""
    return loops.loop(samplers, precision, clock=lambda: 0.0)


def samplers(
    times: Sequence[float], noise: float, seed: int = 0, drift: float = 0.0
) -> dict[str, Sampler]:
    """Kernels that take `times`, with noise, at clocks that fall by `drift` in every 30 rounds."""
    fate, taken = random.Random(seed), [0]

    def one(usual: float) -> Sampler:
        def sample() -> float:
            taken[0] += 1
            clock = 1 + drift * taken[0] / (30 * len(times))
            return usual * clock * (1 + fate.gauss(0, noise))

        return sample

    return {str(index): one(usual) for index, usual in enumerate(times)}


@pytest.mark.parametrize("count", [2, 3, 5, 13])
def test_the_error_that_a_loop_tells_is_the_one_that_it_has(count: int) -> None:
    """Were it less, noise would choose; were it more, ties would hide what is faster."""
    times = [1e-5 * (1 + 0.01 * index) for index in range(count)]
    apart, told = [], []
    for seed in range(60):
        found = loop(samplers(times, 0.023, seed, drift=0.01), 0.004)
        for index in range(1, count):
            apart.append(found.relative(str(index)) / (times[index] / times[0]) - 1)
            errors = hypot(found.error(str(index)), found.error("0"))
            told.append(sqrt(errors**2 - 2 * BETWEEN**2))  # loops here differ by noise alone
    assert pstdev(apart) == pytest.approx(mean(told), rel=0.3)
    assert abs(mean(apart)) < 0.001


def test_clocks_that_fall_are_no_noise() -> None:
    found = loop(samplers((1.0, 0.9, 0.8), 0.0, drift=0.04), 0.01)
    assert (found.relative("0"), found.rounds) == (1.0, FEWEST)
    for name, time in (("1", 0.9), ("2", 0.8)):
        assert found.relative(name) == pytest.approx(time, rel=0.003)
        assert found.spread(name) < 0.005


def test_what_is_noisy_is_measured_longer_and_not_for_ever() -> None:
    rounds = [
        loop(samplers((1.0,) * 4, noise), precision).rounds
        for noise, precision in ((0.003, 0.01), (0.03, 0.01), (0.03, 0.003), (0.3, 0.003))
    ]
    assert rounds[0] == FEWEST < rounds[1] < rounds[2] == rounds[3] == MOST


def test_a_loop_of_what_takes_long_ends_before_all_is_known() -> None:
    seconds = [0.0]

    def slow(sampler: Sampler) -> Sampler:
        def sample() -> float:
            seconds[0] += LONGEST / 40
            return sampler()

        return sample

    noisy = {name: slow(one) for name, one in samplers((1.0, 1.0), 0.3).items()}
    found = loops.loop(noisy, 0.003, clock=lambda: seconds[0])
    assert FEWEST < found.rounds < MOST and 0.9 * LONGEST < seconds[0] <= LONGEST
    seconds[0] = 0.0
    noisy = {name: slow(slow(slow(one))) for name, one in noisy.items()}
    assert loops.loop(noisy, 0.003, clock=lambda: seconds[0]).rounds == FEWEST


def test_nobody_waits_for_the_time_of_what_is_far_behind() -> None:
    quiet = samplers((1.0, 1.0), 0.001)
    far, near = samplers((2.0, 1.0), 0.2).values()
    assert loop({**quiet, "far": far}, 0.003).rounds == FEWEST
    assert loop({**quiet, "near": near}, 0.003).rounds == MOST


def test_every_kernel_is_sampled_once_a_round_and_the_first_round_does_not_count() -> None:
    times = iter([9.0] * DISCARDED + [1.0] * 2 * FEWEST)  # alone it takes twice as many
    found = loop({"alone": lambda: next(times)}, 0.01)
    assert (found.seconds("alone"), found.spread("alone"), found.error("alone")) == (
        1.0,
        0.0,
        BETWEEN,
    )
    assert next(times, None) is None


def test_clocks_are_unsteady_where_all_kernels_say_so() -> None:
    """Single launches of 20 us have such times at steady clocks: each waited a second for them."""
    alone = Timing(
        (20.4e-6, 24.3e-6, 19.4e-6, 20.2e-6, 20.6e-6, 19.5e-6, 19.3e-6, 19.5e-6, 21.5e-6)
    )
    assert Loop({"alone": alone}).unsteady
    fate = random.Random(1)
    others = {
        str(index): Timing(tuple(fate.gauss(20e-6, 0.7e-6) for _ in alone.rounds))
        for index in range(8)
    }
    assert not Loop({"noisy": alone, **others}).unsteady
    throttled = (1.0, 1.0, 1.0, 1.0, 1.06, 1.07, 1.2, 1.2, 1.2)
    slower = {
        name: Timing(tuple(map(float.__mul__, timing.rounds, throttled)))
        for name, timing in {"noisy": alone, **others}.items()
    }
    assert Loop(slower).unsteady

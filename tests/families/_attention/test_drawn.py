"""Attentions that are drawn: the same everywhere, of every kind that is meant, all measurable."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers._attention_drawn import DIMENSIONS, LENGTH, SHARING, attentions
from benchmarks.peers._attention_problem import Attention
from benchmarks.problems import BYTES, FLOPS


@cache
def many() -> list[Attention]:
    return [one for seed in range(10) for one in attentions("any", seed)]


def test_a_seed_draws_the_same_attentions_in_every_version_of_python() -> None:
    """Written down once: a judgement on other problems than those that were fitted must stay so."""
    assert [one.name for one in attentions("attention forward", 1, 6)] == [
        "bf16 d128 causal 5x32x516",
        "bf16 d64 full 55x7x4479",
        "bf16 d128 causal 6x64x384",
        "bf16 d160 window 146 1x6/2x536",
        "bf16 d64 window 81 12x12/6x8192x12229",
        "bf16 d128 full 40x14/1x248x236 packed 3662x2689",
    ]


def test_seeds_and_passes_have_problems_of_their_own() -> None:
    drawn = [{one.name for one in attentions(*which)} for which in (("a", 1), ("a", 2), ("b", 1))]
    assert [len(names) for names in drawn] == [60] * 3
    assert max(len(one & other) for one in drawn for other in drawn if one is not other) < 3


def test_attentions_fit_memory_and_time() -> None:
    assert all(one.moved <= BYTES and one.flops <= FLOPS for one in many())
    for one in many():
        assert one.heads % one.kv_heads == 0 and one.heads <= SHARING * one.kv_heads
        assert max(one.seq, one.columns) <= LENGTH[1]
        assert one.lengths or min(one.seq, one.columns) >= LENGTH[0]


def test_no_row_of_a_mask_is_left_without_columns() -> None:
    """Libraries differ in what such a row gives."""
    masked = [one for one in many() if one.causal or one.window is not None]
    assert all(rows <= columns for one in masked for rows, columns in one.sequences)


@pytest.mark.parametrize(
    ("share", "kind"),
    [
        ((0.40, 0.65), lambda one: one.causal and one.window is None),
        ((0.15, 0.25), lambda one: one.window is not None),
        ((0.02, 0.10), lambda one: one.window is not None and not one.causal),
        ((0.20, 0.35), lambda one: one.lengths),
        ((0.05, 0.15), lambda one: one.lengths_k),
        ((0.55, 0.75), lambda one: one.square),
        ((0.03, 0.15), lambda one: not one.lengths and one.seq > one.columns),
        ((0.03, 0.20), lambda one: not one.lengths and one.causal and one.seq < one.columns),
        ((0.35, 0.55), lambda one: one.heads > one.kv_heads),
        ((0.10, 0.25), lambda one: one.element == "fp16"),
        ((0.02, 0.20), lambda one: one.seq > 2**13),
    ],
)
def test_every_kind_appears(
    share: tuple[float, float], kind: Callable[[Attention], object]
) -> None:
    found = sum(1 for one in many() if kind(one)) / len(many())
    assert share[0] < found < share[1]


def test_every_dimension_and_length_appears() -> None:
    assert {one.dim for one in many()} == {*DIMENSIONS}
    assert {one.seq.bit_length() for one in many()} >= set(range(8, 16))
    tidy = [one for one in many() if one.seq % 64 == 0 and not one.lengths]
    assert 0.25 < len(tidy) / len([one for one in many() if not one.lengths]) < 0.5


@pytest.mark.parametrize("passed", ["forward", "backward"])
def test_both_passes_are_measured_on_problems_that_are_drawn(passed: str) -> None:
    asked = Asked(cells=("drawn",), seed=3, count=4)
    (family,) = runner.named([f"attention_{passed}"])
    cases = list(runner.cases([family], asked))
    drawn = attentions(f"attention {passed}", 3, 4)
    assert [case.name for case in cases] == [f"{one.name} {passed}" for one in drawn]
    assert [case.problem["seed"] for case in cases] == [3] * 4
    assert all(case.gradients == (passed == "backward") for case in cases)
    assert [case.rounds for case in cases] == [16] * 4

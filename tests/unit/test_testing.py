"""`warploom.testing.do_bench`: what it times, what it returns, and what it refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import warploom
from warploom import testing
from warploom.errors import DeviceError, ProblemError
from warploom.runtime import measure
from warploom.runtime.measure import Call, Sampler


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A GPU whose samples are 1, 2, 3 and so on, in microseconds, at 10 ms of wall time each.

    Each sample has the options it was taken with, and how often the function was called before.
    """
    taken: list[dict[str, Any]] = []
    clock = count()

    def sampler(kind: str) -> Callable[..., Sampler]:
        def make(calls: Sequence[Call], **options: Any) -> Sampler:
            numbers = count(1)

            def sample() -> float:
                number = next(numbers)
                calls[(number - 1) % len(calls)]()
                taken.append({"kind": kind, **options})
                return 1e-6 * number

            return sample

        return make

    gc.freeze()  # of what other tests left, each collection would look at all
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(testing, "alone", sampler("alone"))
    monkeypatch.setattr(testing, "graph_sampler", sampler("graph"))
    ticking = SimpleNamespace(perf_counter=lambda: 0.01 * next(clock))
    monkeypatch.setattr(testing, "time", ticking)
    return taken


def test_it_returns_milliseconds_of_what_follows_the_warm_up(
    sampled: list[dict[str, Any]],
) -> None:
    every = testing.do_bench(lambda: None, warmup=50, rep=100, return_mode="all")
    dropped = len(sampled) - len(every)
    assert dropped >= 4 and len(every) >= 9
    assert every == pytest.approx([1e-3 * (dropped + 1 + one) for one in range(len(every))])


def test_a_call_that_takes_longer_than_all_the_time_is_sampled_all_the_same(
    sampled: list[dict[str, Any]],
) -> None:
    assert len(testing.do_bench(lambda: None, warmup=0, rep=0, return_mode="all")) == 5
    assert len(sampled) == 5


@pytest.mark.parametrize(("mode", "expected"), [("min", 1), ("max", 5), ("mean", 3), ("median", 3)])
def test_a_mode_says_what_is_made_of_the_times(
    mode: testing.Mode, expected: float, sampled: list[dict[str, Any]]
) -> None:
    found = testing.do_bench(lambda: None, warmup=0, rep=0, return_mode=mode)
    assert found == pytest.approx(1e-3 * expected)


def test_quantiles_are_a_list_in_their_order_and_one_is_a_float(
    sampled: list[dict[str, Any]],
) -> None:
    told: dict[str, Any] = {"warmup": 0, "rep": 0}
    found = testing.do_bench(lambda: None, quantiles=[0.5, 0.0, 1.0], **told)
    assert found == pytest.approx([3e-3, 1e-3, 5e-3])
    assert testing.do_bench(lambda: None, quantiles=[0.5], **told) == pytest.approx(3e-3)


def test_l2_is_flushed_unless_it_is_not_to_be_and_a_graph_flushes_nothing(
    sampled: list[dict[str, Any]],
) -> None:
    testing.do_bench(lambda: None, 0, 0)
    testing.do_bench(lambda: None, 0, 0, flush=False)
    testing.do_bench(lambda: None, 0, 0, graph=True)
    assert sampled[0] == {"kind": "alone", "flushed": True}
    assert sampled[5] == {"kind": "alone", "flushed": False}
    assert sampled[10] == {"kind": "graph"}


def test_several_functions_take_turns_and_gradients_are_cleared_before_each(
    sampled: list[dict[str, Any]],
) -> None:
    leaf = torch.ones(3, requires_grad=True)
    called: list[str] = []

    def of(name: str) -> Call:
        def call() -> None:
            called.append(name)
            assert leaf.grad is None
            leaf.sum().backward()

        return call

    testing.do_bench([of("a"), of("b")], 0, 0, grad_to_none=[leaf])
    assert called == ["a", "b", "a", "b", "a"]


def test_it_takes_what_tritons_has_where_nothing_is_said(sampled: list[dict[str, Any]]) -> None:
    """`grad_to_none=None`, which is Triton's default, was no sequence."""
    assert testing.do_bench(lambda: None, 0, 0, grad_to_none=None, quantiles=None) > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_afterwards_as_it_was_before(
    enabled: bool, sampled: list[dict[str, Any]]
) -> None:
    """A program that had disabled the collector had it enabled, also by a function that failed."""
    try:
        (gc.enable if enabled else gc.disable)()
        testing.do_bench(lambda: None, 0, 0)
        with pytest.raises(ZeroDivisionError):
            testing.do_bench(lambda: 1 / 0, 0, 0)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_a_function_that_fails_while_it_is_captured_ends_the_capture(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the process captured next failed, but after a RuntimeError."""
    graph = MagicMock()
    monkeypatch.setattr(torch, "cuda", MagicMock(CUDAGraph=lambda: graph))
    monkeypatch.setattr(measure, "elapsed", lambda call: 1.0)
    calls = count()

    def second() -> None:
        if next(calls):
            raise error("told")

    with pytest.raises(error, match="told"):
        measure.graph_sampler([second])
    graph.capture_end.assert_called_once_with()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"fn": 3}, "fn 3 of type int: must be a function without arguments"),
        ({"fn": []}, r"fn \[\] of type list"),
        ({"warmup": -1}, "warmup -1: must be milliseconds"),
        ({"rep": "1"}, "rep '1': must be milliseconds"),
        ({"rep": float("inf")}, "rep inf"),
        ({"quantiles": 0.5}, "quantiles 0.5: must be a list"),
        ({"quantiles": [2]}, r"quantiles \[2\]: must be a list of numbers from 0 to 1"),
        ({"return_mode": "sum"}, "return_mode 'sum': must be one of min, max, mean, median, all"),
        ({"grad_to_none": torch.ones(2)}, "grad_to_none .* of type Tensor: must be a list of tens"),
        ({"grad_to_none": [3]}, r"grad_to_none \[3\] of type list: must be a list of tensors"),
        ({"flush": 1}, "flush 1: must be True or False"),
        ({"graph": "no"}, "graph 'no': must be True or False"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ProblemError, match=told):
        testing.do_bench(**{"fn": lambda: None, **arguments})


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="do_bench times what runs on a GPU"):
        warploom.testing.do_bench(lambda: None)

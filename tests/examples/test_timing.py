"""examples/timing.py: who is timed when."""

from __future__ import annotations

import itertools

import pytest
import torch

import timing

CPU = torch.device("cpu")


def test_contenders_take_turns_and_none_always_follows_the_same_other() -> None:
    """Where one always follows the same other, it is timed at the clock that that one left."""
    called: list[str] = []
    contenders = {name: (lambda name=name: called.append(name)) for name in "abc"}
    seconds = timing.interleave(contenders, CPU, rounds=9, laps=2)
    assert called[::2] == called[1::2]
    rounds = ["".join(called[2 * at : 2 * at + 6 : 2]) for at in range(0, 30, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    follows = {pair for one in rounds for pair in itertools.pairwise(one)}
    assert follows == {(one, other) for one in "abc" for other in "abc" if one != other}
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 9, "b": 9, "c": 9}


def test_what_is_discarded_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([100.0, 3.0, 1.0, 2.0])
    monkeypatch.setattr(timing, "elapsed", lambda *_: next(taken))
    seconds = timing.interleave({"a": lambda: None}, CPU, rounds=3)
    assert seconds == {"a": [3.0, 1.0, 2.0]} and timing.medians(seconds) == {"a": 2.0}

"""examples/timing.py: who is timed when."""

from __future__ import annotations

import pytest
import torch

import timing

CPU = torch.device("cpu")


def test_contenders_take_turns_and_another_begins_each_round() -> None:
    """Where one always follows the same other, it is timed on what that one left behind."""
    called: list[str] = []
    contenders = {name: (lambda name=name: called.append(name)) for name in "abc"}
    seconds = timing.interleave(contenders, CPU, rounds=3, laps=2)
    assert "".join(called) == "aabbccbbccaaccaabbaabbcc"
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_is_discarded_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([100.0, 3.0, 1.0, 2.0])
    monkeypatch.setattr(timing, "elapsed", lambda *_: next(taken))
    seconds = timing.interleave({"a": lambda: None}, CPU, rounds=3)
    assert seconds == {"a": [3.0, 1.0, 2.0]} and timing.medians(seconds) == {"a": 2.0}

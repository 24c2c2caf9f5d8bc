"""Two checkouts in one loop: each cell is measured as often of both, and ratios are of medians."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import checkouts


class Server:
    """Stands in for the process of a checkout: the second is twice as fast."""

    made = 0

    def __init__(self, path: Path) -> None:
        Server.made += 1
        self.seconds = 4e-6 / Server.made
        self.asked: list[str] = []

    def ask(self, name: str) -> None:
        self.asked.append(name)

    def answer(self) -> str:
        return "ready" if self.asked.count(self.asked[-1]) == 1 else str(self.seconds)


def test_a_checkout_that_is_faster_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Server, "made", 0)
    monkeypatch.setattr(checkouts, "Server", Server)
    found = tmp_path / "times.json"
    arguments = ["old", "new", "--match", "gemm bf16 1x", "--json", str(found)]
    monkeypatch.setattr(sys, "argv", ["checkouts", *arguments])
    checkouts.main()
    (times,) = json.loads(found.read_text()).values()
    assert [len(one) for one in times] == [checkouts.ROUNDS] * 2
    assert "gemm: geometric mean of old / new 2.0000" in capsys.readouterr().out

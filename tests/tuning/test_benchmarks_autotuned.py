"""Cells are tuned together, measured once nothing compiles, and into no file that stays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import autotuned
from benchmarks.families import BEFORE, Asked, Case
from warploom.runtime.contest import Contender
from warploom.tuning.autotune.report import Tuned

WAITING = "waiting for a call outside a capture"


class Tuning:
    """Tunes what calls meet: compiles for three looks at it, and is measured by one call more."""

    def __init__(self) -> None:
        self.met: dict[str, Tuned] = {}
        self.calls: list[str] = []
        self.looks = 0
        self.folder = ""

    def __enter__(self) -> Self:
        self.folder = os.environ["WARPLOOM_RECORDS_DIR"]
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def problems(self) -> Sequence[Tuned]:
        self.looks += 1
        if self.looks > 3:
            for name, one in self.met.items():
                if one.status == "compiling":
                    self.met[name] = replace(one, status=WAITING)
        return list(self.met.values())

    def call(self, name: str, after: str) -> None:
        self.calls.append(name)
        if name not in self.met:
            self.met[name] = Tuned(name, "compiling")
        elif self.met[name].status == WAITING:
            compiling = [one for one in self.met.values() if one.status == "compiling"]
            assert not compiling, "measured beside compilers"
            self.met[name] = Tuned(name, "tuned", "old", 3e-6, after, 2e-6, 0.04, 1.0)


def case(tuning: Tuning, name: str, after: str, reason: str = "cost model") -> Case:
    def contenders(_asked: Asked) -> list[Contender]:
        call = lambda: tuning.call(name, after) if reason.startswith("cost") else None  # noqa: E731
        return [Contender("warploom", [call], told=lambda: ("kernel", reason))]

    return Case(f"bf16 {name}", {"m": 1}, None, contenders, tuned=name)


def test_what_was_found_is_told_and_goes_to_no_file_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuning = Tuning()
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", "the user's")
    monkeypatch.setattr(autotuned, "autotune", lambda jobs: tuning)
    monkeypatch.setattr(autotuned.machine, "warm", lambda: None)
    monkeypatch.setattr(autotuned.torch.cuda, "synchronize", lambda: None)
    cases = [
        case(tuning, "one", "new"),
        case(tuning, "two", "old"),
        case(tuning, "three", "new", "recorded 2026-11-22 at this shape"),
    ]
    noted, asked = autotuned.tuned(cases, Asked())
    assert os.environ["WARPLOOM_RECORDS_DIR"] == "the user's" != tuning.folder
    assert not Path(tuning.folder).exists()
    assert sorted(tuning.calls) == ["one", "one", "two", "two"]
    assert asked.before == {"one": "old"}
    now: dict[str, Any] = {"contender": "warploom", "seconds": 2e-6, "error_share": 0.5}
    before = {**now, "contender": BEFORE, "seconds": 2.5e-6}
    entries = [[now, before], [now], [now]]
    cells = [
        {"name": one.name, "problem": one.problem, "entries": times}
        for one, times in zip(noted, entries, strict=True)
    ]
    (row,) = autotuned.table(cells)
    assert dict(zip(autotuned.COLUMNS, row, strict=True)) == {
        "problem": "bf16 one",
        "before us": pytest.approx(3.0),
        "after us": pytest.approx(2.0),
        "gained": pytest.approx(1.5),
        "again": pytest.approx(1.25),
        "kernel before": "old",
        "kernel after": "new",
    }
    told = autotuned.summary(cells)
    assert (told["problems"], told["tuned"], told["changed"]) == (2, 2, 1)
    assert told["gained"] == pytest.approx(1.25**0.5)
    # A wrong result gains nothing, however fast it is.
    cells[0]["entries"] = [{**now, "error_share": 2.0}, before]
    assert autotuned.table(cells)[0][4] is None and autotuned.summary(cells)["gained"] == 1.0

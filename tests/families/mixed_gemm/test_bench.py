"""The cells of the family: which there are, what they are called, and a run of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mixed_stand_in as stand_in
import pytest
from samplers import constant

import warploom
from benchmarks import runner, tables, wording
from benchmarks.families import Asked, Case
from benchmarks.peers import _mixed_problem
from benchmarks.peers.mixed_gemm import FAMILY, LISTED
from benchmarks.protocol import Record, read


def listed(**asked: Any) -> list[Case]:
    return list(runner.cases(runner.named(["mixed_gemm"]), Asked(**asked)))


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({}, 6 * 9 * 4),
        ({"types": ("mxfp4",), "m": (1, 17)}, 6 * 2),  # 17: a number that no list has
        ({"match": "w4a8 16x2112x7168"}, 1),
        ({"cells": ("zeros",)}, 6 * 9),
        ({"cells": ("mxfp8",), "m": (16,)}, 6 * 2),
        ({"cells": ("nvfp4",), "m": (16,)}, 6),
        ({"cells": ("two_bits",), "m": (1, 1024)}, 6 * 2 * 3),
        ({"cells": ("decode",)}, 3 * 2),
        ({"cells": ("experts",)}, 2 * 2 * 3 * 3),
        ({"cells": ("experts",), "m": (16,), "match": "mxfp4 GPT-OSS-120B"}, 3),
        ({"cells": ("decode",), "types": ("w4a16",), "m": (16,)}, 1),
    ],
)
def test_cells_are_those_that_were_asked_for(asked: dict[str, Any], count: int) -> None:
    assert len(listed(**asked)) == count


def test_the_floor_is_what_must_be_read() -> None:
    (case,) = listed(match="w4a16 1x28672x4096")
    assert case.floor is not None and case.floor.limit == "bytes"
    assert case.floor.seconds * 1e6 == pytest.approx(60.6e6 / 4.35e12 * 1e6, rel=0.01)
    (case,) = listed(match="w4a8 4096x28672x4096")
    assert case.floor is not None and case.floor.limit == "flops"
    assert case.floor.seconds * 1e6 == pytest.approx(601, rel=0.01)
    (case,) = listed(cells=("decode",), types=("w4a16",), m=(1,))
    weights = 4 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336) * 4.125 / 8
    read = weights + 2 * 32000 * 4096 + 4 * 4 * 8 * 1024 * 128
    assert case.floor is not None
    assert case.floor.seconds == pytest.approx(read / 4.35e12, rel=0.01)


def test_the_weights_of_a_step_are_those_of_the_cells() -> None:
    model = {(one["n"], one["k"]) for one in (case.problem for case in listed(m=(1,)))}
    assert model == {(n, k) for n, k in LISTED["weights"]}
    for case in [*listed(), *listed(cells=("zeros", "decode"))]:
        assert FAMILY.division(case.problem).startswith(case.problem["type"])
        assert FAMILY.at(case.problem) == case.problem["m"] and FAMILY.subject(case.problem)


def test_a_run_is_recorded_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_mixed_problem, "packed", stand_in.packed)
    monkeypatch.setattr(warploom, "mixed_gemm", stand_in.multiplied, raising=False)
    told = SimpleNamespace(kernel="a kernel", reason="a record")
    monkeypatch.setattr(warploom, "explain", lambda *_, **__: told)
    monkeypatch.setitem(LISTED, "weights", [[64, 128]])
    _mixed_problem.quantised.cache_clear()
    asked = Asked(m=(2,), device="cpu")
    record = Record(tmp_path / "result.json", "bench_mixed_gemm", {})
    found = list(runner.measured(listed(m=(2,)), asked, constant(1e-5)))
    for cell in found:
        record.add(cell)
    cells = read(record.path)["cells"]
    assert [cell["problem"]["type"] for cell in cells] == LISTED["types"]
    for title, own in wording.sections({"cells": cells}).items():
        assert title.startswith("Mixed GEMM")
        columns, rows = tables.of_cells(own)
        assert "Warploom us" in columns and len(rows) == 1
    assert runner.exit_code(found, allow_missing=True) == 0
    _mixed_problem.quantised.cache_clear()

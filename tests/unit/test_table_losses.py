"""The tool that judges default tables tells how far choices are behind, by right kernels alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import table_losses
from click.testing import CliRunner

from warploom.generator.families.dequantize import (
    DequantizeOperation,
    DequantizeSchedule,
    DequantizeShape,
)
from warploom.generator.launches import NO_GPU
from warploom.runtime.dispatch import tabled

OPERATION, SHAPE = DequantizeOperation("bf16", "int4", 128, "bf16"), DequantizeShape(1, 4096, 4096)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(table_losses.main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def entry(schedule: DequantizeSchedule, outcome: str, seconds: float | None) -> str:
    operation = {"family": "dequantize", **asdict(OPERATION)}
    fields = {"operation": operation, "shape": asdict(SHAPE), "schedule": asdict(schedule)}
    return json.dumps({**fields, "outcome": outcome, "seconds": seconds})


def test_a_choice_is_compared_with_the_fastest_kernel_that_was_right(tmp_path: Path) -> None:
    chosen = tabled(OPERATION, SHAPE, NO_GPU).spec.schedule
    assert isinstance(chosen, DequantizeSchedule)
    others = [replace(chosen, slabs=n) for n in (1, 2, 8) if n != chosen.slabs]
    journal = tmp_path / "drawn.journal"
    lines = [
        entry(chosen, "correct", 1.5e-5),
        entry(others[0], "correct", 1.2e-5),
        entry(others[1], "wrong", None),
    ]
    journal.write_text("\n".join([json.dumps({"schema": 1}), *lines]))
    told = run("losses", journal)
    assert "1.250" in told and f"slabs{others[0].slabs}" in told
    assert "drawn.journal: 1 shapes, mean 1.2500, largest 1.250" in told
    journal.write_text("\n".join(lines[1:]))
    assert "drawn.journal: 1 shapes whose choice was not measured" in run("losses", journal)


def test_a_seed_gives_the_same_shapes_within_the_rows_that_were_asked_for() -> None:
    told = run("shapes", "--seed", 7, "--count", 40, "--rows", 65, 400, "--groups", 16)
    assert told == run("shapes", "--seed", 7, "--count", 40, "--rows", 65, 400, "--groups", 16)
    shapes = [[*map(int, one.split("x"))] for one in told.strip().split(",")]
    assert len(shapes) == 40
    for groups, m, n, k in shapes:
        assert groups == 16 and 65 <= m <= 400 and n % 128 == 0 and k % 128 == 0

"""The tool that judges default tables tells how far choices are behind, by right kernels alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import table_losses
from click.testing import CliRunner

from warploom.generator.families.dequantize import (
    DequantizeOperation,
    DequantizeSchedule,
    DequantizeShape,
)
from warploom.generator.launches import NO_GPU
from warploom.generator.records import Environment
from warploom.runtime.dispatch import tabled
from warploom.tuning.journal import Entry, Journal, Result

OPERATION, SHAPE = DequantizeOperation("bf16", "int4", 128, "bf16"), DequantizeShape(1, 4096, 4096)
HERE = Environment("NVIDIA H200", 132, "13.0", 1)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(table_losses.main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def journal(path: Path, *results: Result) -> Path:
    opened = Journal(path)
    for result in results:
        opened.add(Entry(OPERATION, SHAPE, HERE, result))
    opened.close()
    return path


def test_a_choice_is_compared_with_the_fastest_kernel_that_was_right(tmp_path: Path) -> None:
    chosen = tabled(OPERATION, SHAPE, NO_GPU).spec.schedule
    assert isinstance(chosen, DequantizeSchedule)
    faster, wrong = replace(chosen, slabs=2), replace(chosen, slabs=8)
    others = [
        Result(faster, "correct", 1.2e-5, 0.01, 1.0),
        Result(wrong, "wrong", reason="far off"),
    ]
    measured = Result(chosen, "correct", 1.5e-5, 0.01, 1.0)
    output = run("losses", journal(tmp_path / "all.journal", measured, *others))
    assert "1.250" in output and "slabs2" in output
    assert "all.journal: 1 shapes, mean 1.2500, largest 1.250" in output
    output = run("losses", journal(tmp_path / "some.journal", *others))
    assert "some.journal: 1 shapes whose choice was not measured" in output


def test_a_seed_gives_the_same_shapes_within_the_rows_that_were_asked_for() -> None:
    options = ("shapes", "--seed", 7, "--count", 40, "--rows", 65, 400, "--groups", 16)
    output = run(*options)
    assert output == run(*options)
    shapes = [[*map(int, one.split("x"))] for one in output.strip().split(",")]
    assert len(shapes) == 40
    for groups, m, n, k in shapes:
        assert groups == 16 and 65 <= m <= 400 and n % 128 == 0 and k % 128 == 0

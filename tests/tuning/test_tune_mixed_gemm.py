"""`warploom tune mixed_gemm`, which no model helps: search, journal, records; what calls get."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from decisions import H200
from sweeps import environment, own_share

from warploom.cli import main
from warploom.errors import UnknownNameError
from warploom.generator import records_file
from warploom.generator.families.mixed_gemm import (
    MixedGemmOperation,
    MixedGemmSchedule,
    MixedGemmShape,
)
from warploom.runtime import dispatch, records
from warploom.tuning import journal
from warploom.tuning.problems import Problem, default, problems, shapes_of, usual

OPERATION = MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16")
SPACE = """\
version: 1
arch: sm_90a
kernels:
  - operations: [{family: mixed_gemm, a: bf16, b: int4, d: bf16, group: 128, scale: bf16}]
    schedules:
      - tile: [[8, 64, 128], [16, 64, 128], [16, 64, 256], [16, 128, 128], [16, 128, 256]]
        multiply: mma
        scaled: sums
        warp_split_k: [1, 2]
        ctas_per_sm: [1, 2]
        cluster_split_k: [1, 2, 4]
      - tile: [[128, 128, 128], [128, 256, 128]]
        multiply: wgmma
        scaled: weights
        store: tma
        stream_k: [false, true]
"""
SHAPES = ("16x4096x4096", "512x4096x4096")


def seconds(problem: Problem, schedule: MixedGemmSchedule) -> float:
    """Made up: many rows want wide tiles, few rows narrow ones, and some kernels are better.

    Those that the table has first are not.
    """
    m, n, _ = schedule.tile
    steps = -(-problem.shape.m // m) * (m + 32) * (n + 64)  # type: ignore[attr-defined]
    steps += steps // 2 * (schedule.cluster_split_k == 2 or schedule.tile == (128, 128, 128))
    return 1e-9 * steps * (1 + 0.2 * own_share(f"{schedule} {problem}"))


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return path


@pytest.fixture
def sweep(space: Path, tmp_path: Path) -> Path:
    """What a GPU that is made up takes for all there is."""
    path = tmp_path / "sweep.jsonl"
    log = journal.Journal(path)
    for problem in problems(space, SHAPES):
        untuned = default(problem.operation, problem.shape, H200)
        hinted = usual(problem.operation, problem.shape, H200)
        for spec in dict.fromkeys([untuned, *hinted, *problem.space]):
            taken = seconds(problem, spec.schedule)  # type: ignore[arg-type]
            relative = taken / seconds(problem, untuned.schedule)  # type: ignore[arg-type]
            found = journal.Result(spec.schedule, "correct", taken, 0.004, relative)
            here = replace(environment("mixed_gemm"), nvrtc=H200.nvrtc)
            log.add(journal.Entry(problem.operation, problem.shape, here, found))
    log.close()
    return path


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def chosen(m: int, **more: Any) -> dispatch.Choice:
    return dispatch.choose(OPERATION, MixedGemmShape(m, 4096, 4096), device=H200, **more)


def test_a_run_records_what_calls_then_get(space: Path, sweep: Path, fresh: Path) -> None:
    before = {m: chosen(m) for m in (16, 512, 12, 33)}
    options = ("--shapes", ",".join(SHAPES), "--replay", sweep, "--records", fresh)
    done = tune(space, *options, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["problems ended"]["tuned"] == 2
    records.forget()
    kept = {one.shape.m: one for one in records_file.read(fresh)}  # type: ignore[attr-defined]
    for m, one in kept.items():
        found = chosen(m)
        assert found.spec.schedule == one.best.schedule and "at this shape" in found.reason
        assert one.default and one.default.schedule == before[m].spec.schedule
        assert one.best.seconds < 0.98 * one.default.seconds  # else it proves nothing
    # The table knows more of other shapes than a record of 16 rows does.
    assert chosen(12) == before[12] and chosen(33) == before[33]


def test_a_run_that_was_cut_short_goes_on_and_ends_as_if_it_had_not_been(
    space: Path, sweep: Path, tmp_path: Path
) -> None:
    whole, rest = tmp_path / "whole.json", tmp_path / "rest.json"
    options = (space, "--shapes", SHAPES[0], "--replay", sweep)
    assert tune(*options, "--records", whole).exit_code == 0
    lines = (tmp_path / "whole.journal.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rest.journal.jsonl").write_text("".join(lines[: len(lines) // 2]))
    assert tune(*options, "--records", rest).exit_code == 0
    log = journal.read(tmp_path / "rest.journal.jsonl")
    again = [entry.result.schedule for entry in log[: len(lines) // 2 - 1]]
    assert len({*again}) == len(again) > 5  # what was measured was not measured again
    assert [one.best for one in records_file.read(rest)] == [
        one.best for one in records_file.read(whole)
    ]
    assert "recorded before" in tune(*options, "--records", rest).stdout


def test_layers_of_a_model_are_tuned_by_its_name(space: Path) -> None:
    listed = problems(space, model="llama3-8b", rows=(16,))
    assert [str(one.shape) for one in listed] == [
        *("16x6144x4096", "16x4096x4096", "16x28672x4096", "16x4096x14336")
    ]
    assert len(problems(space)) == 6 * 9  # every cell that is measured
    with pytest.raises(UnknownNameError, match="has llama3-8b"):
        shapes_of(OPERATION, (), "llama", ())


def test_shipped_spaces_have_many_legal_points() -> None:
    root = Path(__file__).parents[2] / "configs" / "mixed_gemm"
    formats = {"space": 1, "space_8bit": 1, "space_2bit": 2, "space_microscaling": 2}
    assert {path.stem for path in root.glob("space*.yaml")} == set(formats)
    for name, count in formats.items():
        listed = problems(root / f"{name}.yaml", ["16x4096x4096", "4096x4096x4096"])
        assert len(listed) == 2 * count and min(len(one.space) for one in listed) > 50

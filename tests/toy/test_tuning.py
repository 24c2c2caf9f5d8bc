"""The tuner, the commands and the choice of a kernel, for a family that nobody told them of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from stand_ins import build_many
from sweeps import default_of, swept_seconds, write_sweep

from warploom.cli import main
from warploom.generator import build, configurations, records_file
from warploom.generator.families.base import Family
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.runtime import dispatch, records
from warploom.tuning.problems import problems

H200 = DeviceLimits(132, "NVIDIA H200", "13.0")
SHAPES = ("4096", "1000000", "100000000")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Records that the tuner wrote, of a GPU that is made up."""
    listed = problems(configurations.spaces()["axpy"][0], SHAPES)
    sweep, path = write_sweep(tmp_path / "sweep.jsonl", listed), tmp_path / "records.json"
    options = ("--shapes", ",".join(SHAPES), "--records", path, "--replay", sweep)
    done = run("tune", "axpy", *options, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["problems ended"]["tuned"] == len(listed) == 6
    return path


def test_the_tuner_finds_what_is_nearly_the_best_of_its_space(tuned: Path) -> None:
    found = {(one.operation, one.shape): one for one in records_file.read(tuned)}
    for problem in problems(configurations.spaces()["axpy"][0], SHAPES):
        record = found[problem.operation, problem.shape]
        best = min(swept_seconds(problem, spec) for spec in problem.space)
        assert record.best.seconds <= 1.03 * best
        assert record.default and record.default.schedule == default_of(problem).schedule
    told = run("records", "show", tuned, "--json")
    assert told.exit_code == 0 and "axpy" in told.stdout


def test_calls_get_what_was_given_recorded_or_listed_in_that_order(
    axpy: Family, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, small, large = axpy.operation("bf16"), axpy.shape(4096), axpy.shape(1 << 30)
    table = dispatch.choose(operation, small)
    assert (
        table.reason == "default table: first of its class" and table.spec.schedule.threads == 128
    )
    assert dispatch.choose(operation, large).spec.schedule.turns == 4
    given = dispatch.choose(operation, large, spec=table.spec)
    assert (given.spec, given.reason) == (table.spec, "the spec that was given")
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tuned.parent))
    tuned.rename(tuned.with_name("nvidia_h200.json"))
    records.forget()
    try:
        exact = dispatch.choose(operation, small, device=H200)
        near = dispatch.choose(operation, axpy.shape(5000), device=H200)
        assert exact.reason.startswith("recorded 20") and exact.seconds
        assert near.reason.startswith("nearest record, n4096")
        assert dispatch.choose(operation, small, device=NO_GPU) == table
    finally:
        monkeypatch.undo()
        records.forget()


def test_commands_list_and_compile_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (smoke,) = (path for path in configurations.smoke() if path.parent.name == "axpy")
    listed = run("list", smoke, "--json")
    assert json.loads(listed.stdout)["legal"] == 7
    rejected = run("list", configurations.spaces()["axpy"][0], "--rejected")
    assert "values 8 of fp32: a load has 16 bytes" in rejected.stdout
    monkeypatch.setattr(build, "build_many", build_many)
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path))
    compiled = run("compile", smoke, "--json")
    assert compiled.exit_code == 0, compiled.stderr
    rows = json.loads(compiled.stdout)["kernels"]
    assert {(row["tile"], row["threads"]) for row in rows} >= {
        ("1024", 128),
        ("1024", 256),
        ("16384", 512),
    }
    shown = run("show", rows[0]["name"], "--json")
    assert shown.exit_code == 0 and "alpha x + y" in shown.stdout

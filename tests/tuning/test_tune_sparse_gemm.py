"""`warploom tune sparse_gemm`: what is searched, and which calls get what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from decisions import H200
from sweeps import write_sweep

from warploom.cli import main
from warploom.generator import configurations, records_file
from warploom.generator.families import family
from warploom.generator.families.sparse_gemm import (
    SparseGemmOperation,
    SparseGemmSchedule,
    SparseGemmShape,
)
from warploom.runtime import dispatch, records
from warploom.tuning.problems import default, problems

SPACE = configurations.spaces()["sparse_gemm"][0]
SHAPE, WRITTEN = SparseGemmShape(64, 6144, 4096), "64x6144x4096"
BF16 = SparseGemmOperation("bf16")
E4M3 = SparseGemmOperation("e4m3", output="bf16", scaled=True)


def chosen(operation: SparseGemmOperation) -> dispatch.Choice:
    return dispatch.choose(operation, SHAPE, device=H200)


def test_a_run_records_what_other_types_and_epilogues_get(tmp_path: Path, fresh: Path) -> None:
    searched = problems(SPACE, [WRITTEN])
    assert [one.operation for one in searched] == [BF16, E4M3]
    options = ("--shapes", WRITTEN, "--replay", write_sweep(tmp_path / "sweep.jsonl", searched))
    done = CliRunner().invoke(
        main, ["tune", "sparse_gemm", *map(str, options), "--records", str(fresh)]
    )
    assert done.exit_code == 0, done.stderr
    records.forget()
    best = {one.operation: one.best.schedule for one in records_file.read(fresh)}
    assert best.keys() == {BF16, E4M3}
    for operation, alike in [
        (BF16, BF16),
        (replace(BF16, element="fp16", bias=True, activation="silu"), BF16),
        (E4M3, E4M3),
        (SparseGemmOperation("int8", output="fp16"), E4M3),
    ]:
        found = chosen(operation)
        assert found.spec.operation == operation and found.spec.schedule == best[alike]
        assert "at this shape" in found.reason


def test_every_case_has_a_space_with_the_schedules_of_the_table_in_it() -> None:
    searched = problems(SPACE)
    assert len(searched) == 2 * 24
    for one in searched:
        untuned = default(one.operation, one.shape, H200)
        assert len(one.space) > 100 and untuned in one.space, untuned.name


@pytest.mark.parametrize(
    ("m", "n", "k", "slower", "faster"),
    [
        # Measured on an H200: a half of the SMs had tiles, all tokens were read by 64 rows each.
        (16, 4096, 14336, (1, 1, 16, 12, 1), (1, 1, 16, 12, 2)),
        (64, 28672, 4096, (1, 1, 64, 12, 1), (2, 1, 64, 8, 1)),
        (64, 28672, 4096, (2, 1, 64, 8, 4), (2, 1, 64, 8, 1)),
        (1024, 4096, 4096, (2, 2, 192, 4, 1), (2, 1, 256, 4, 1)),
        (8192, 8192, 8192, (2, 1, 128, 7, 1), (2, 2, 192, 4, 1)),
    ],
)
def test_the_model_knows_what_was_measured_to_be_faster(
    m: int, n: int, k: int, slower: tuple[int, ...], faster: tuple[int, ...]
) -> None:
    def seconds(schedule: tuple[int, ...]) -> float:
        *fields, split_k = schedule
        made = SparseGemmSchedule(*fields, split_k=split_k)  # type: ignore[arg-type]
        known = family("sparse_gemm")
        return known.seconds(known.constants, BF16, made, SparseGemmShape(m, n, k), 132)

    assert seconds(slower) > 1.1 * seconds(faster)

"""`warploom tune` end to end on a replayed sweep: bad input, interrupts, kill -9 and resuming."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from click.testing import CliRunner, Result
from commands import lines, until
from disks import limited
from forked import Program, Running
from sweeps import GPU, SHAPES, entries, own_share, write_sweep

from warploom.cli import main, tune
from warploom.cli.engines import Engines
from warploom.errors import DeviceError
from warploom.generator import records_file
from warploom.tuning import journal
from warploom.tuning import problems as problem_lists
from warploom.tuning.gpu import Gpu
from warploom.tuning.problems import Problem
from warploom.tuning.replay import NoCompiler

ALL = ",".join(SHAPES)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def start(results: int, *arguments: object) -> Running:
    """Begin a run that measures so many results, and then waits to be stopped."""
    code = "import commands; commands.replayed()"
    return forked.begin(Program(code, [str(results), "tune", *map(str, arguments)]))


def picks(path: Path) -> dict[Any, Any]:
    return {(one.operation, one.shape): one.best.schedule for one in records_file.read(path)}


def test_a_run_records_and_reports(space: Path, sweep: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    options = ("--records", records, "--replay", sweep)
    done = run(space, "--shapes", ALL, *options, "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["problems ended"]["tuned"] == 3
    assert len(picks(records)) == 3
    assert all(row["default / best"] >= 1 for row in document["problems"])
    again = run(space, "--shapes", ALL, *options)
    assert again.exit_code == 0 and again.stdout.count("recorded before") == 4
    assert (tmp_path / "records.journal.jsonl").stat().st_size > 1000


def test_exhaustive_and_default_runs_pick_alike(space: Path, sweep: Path, tmp_path: Path) -> None:
    found = []
    for name, flags in (("searched", []), ("swept", ["--exhaustive"])):
        path = tmp_path / f"{name}.json"
        options = ("--records", path, "--replay", sweep, *flags)
        assert run(space, "--shapes", SHAPES[1], *options).exit_code == 0
        (record,) = records_file.read(path)
        found.append(record.best.seconds)
    swept = journal.read(tmp_path / "swept.journal.jsonl")
    assert len({entry.result.schedule for entry in swept}) > 50
    assert found[0] <= 1.02 * found[1]


def test_wrong_results_are_loud_and_the_exit_code_is_3(
    space: Path, listed: list[Problem], tmp_path: Path
) -> None:
    sweep = write_sweep(
        tmp_path / "sweep.jsonl",
        listed[:1],
        lambda spec: "wrong" if own_share(spec.name) < 0.3 else "correct",
    )
    records = tmp_path / "records.json"
    done = run(space, "--shapes", SHAPES[0], "--records", records, "--replay", sweep)
    assert done.exit_code == 3
    assert "WRONG RESULT: gemm_sm90a" in done.stderr
    assert len(picks(records)) == 1


# ---- Kill, interrupt, resume ---------------------------------------------------------------------


def test_a_run_killed_at_any_time_goes_on_and_ends_as_if_it_had_not_been(
    space: Path, sweep: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.json"
    assert run(space, "--shapes", ALL, "--records", whole, "--replay", sweep).exit_code == 0
    records, log = tmp_path / "records.json", tmp_path / "records.journal.jsonl"
    options = (space, "--shapes", ALL, "--records", records, "--replay", sweep)
    for more in (14, 20, 15):
        before = lines(log)
        running = start(more, *options)
        enough = before + more
        os.kill(until(lambda enough=enough: lines(log) >= enough, running), signal.SIGKILL)
        assert running.wait()[0].returncode == -signal.SIGKILL
        assert len(journal.read(log)) >= before + more - 1  # the first line is its head
    measured = lines(log)
    done = run(*options)
    assert done.exit_code == 0, done.stderr
    assert picks(records) == picks(whole)
    uninterrupted = lines(tmp_path / "whole.journal.jsonl")
    assert lines(log) < measured + uninterrupted  # what was measured was not measured again


def test_an_interrupt_keeps_what_is_done_and_says_so(
    space: Path, sweep: Path, tmp_path: Path
) -> None:
    records, log = tmp_path / "records.json", tmp_path / "records.journal.jsonl"
    options = (space, "--shapes", ALL, "--records", records, "--replay", sweep)
    running = start(8, *options)
    os.kill(until(lambda: lines(log) >= 8, running), signal.SIGINT)
    (ended,) = running.wait()
    assert ended.returncode == 130
    assert "the same command goes on" in ended.stderr and "not reached" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert run(*options).exit_code == 0
    assert len(picks(records)) == 3


def test_two_runs_do_not_share_a_journal(space: Path, sweep: Path, tmp_path: Path) -> None:
    records, log = tmp_path / "records.json", tmp_path / "records.journal.jsonl"
    options = (space, "--shapes", ALL, "--records", records, "--replay", sweep)
    running = start(1, *options)
    process = until(lambda: lines(log) >= 2, running)
    done = run(*options)
    os.kill(process, signal.SIGKILL)
    running.wait()
    assert done.exit_code == 1 and "one run at a time" in done.stderr


def test_a_full_disk_is_told_and_the_same_command_goes_on(
    space: Path, sweep: Path, tmp_path: Path
) -> None:
    whole, records = tmp_path / "whole.json", tmp_path / "records.json"
    assert run(space, "--shapes", ALL, "--records", whole, "--replay", sweep).exit_code == 0
    options = (space, "--shapes", ALL, "--records", records, "--replay", sweep)
    for size in (5_000, 20_000):
        with limited(size):
            done = run(*options)
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
        assert "cannot be written" in done.stderr and "free some space" in done.stderr
    assert run(*options).exit_code == 0
    assert picks(records) == picks(whole)


def test_records_on_a_disk_that_is_only_read_are_refused_before_anything_is_measured(
    space: Path, sweep: Path, tmp_path: Path
) -> None:
    """The run ended when its first problem did, after minutes, and that was not recorded."""
    log = tmp_path / "own.jsonl"
    options = ("--records", "/proc/records.json", "--journal", log, "--replay", sweep)
    done = run(space, "--shapes", ALL, *options)
    assert done.exit_code == 1 and "/proc/records.json: cannot be written" in done.stderr
    assert lines(log) <= 1


# ---- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--shapes, --model and --cells"),
        (["--cells", "--shapes", "1x8x8"], "--shapes, --model and --cells"),
        (["--shapes", "512x6144"], "a shape of this product must be mxnxk"),
        (["--shapes", "512x6144x-1"], "positive numbers"),
        (["--shapes", "0x6144x64"], "positive numbers"),
        (["--shapes", "999999999999x64x64"], "m 999999999999: must be at most 2147483647"),
        (["--shapes", f"{'9' * 5000}x64x64"], "must be at most 2147483647"),
        (["--shapes", "16x1e3x64"], "n '1e3': must be an integer greater than 0"),
        (["--model", "llama9"], "llama3-8b"),
        (["--shapes", "16x64x64", "--budget", "0"], "more than 0"),
        (["--shapes", "16x64x64", "--budget", "-3"], "more than 0"),
        (["--shapes", "16x64x64", "--budget", "nan"], "--budget nan: must be a number of seconds"),
        (["--shapes", "16x64x64", "--budget", "inf"], "--budget inf: must be a number of seconds"),
        (["--shapes", "16x64x64", "--gpus", "0"], "--gpus"),
        (["--model", "llama3-8b", "--m", "x"], "positive numbers"),
        (["--shapes", "16x64x64", "--replay", "none.jsonl"], "a file of its own"),
        (["--shapes", "16x64x64", "--replay", "no.jsonl", "--records", "r.json"], "No such file"),
    ],
)
def test_what_cannot_be_tuned_is_said(space: Path, arguments: list[str], told: str) -> None:
    done = run(space, *arguments)
    assert done.exit_code == 1
    assert told in done.stderr, done.stderr


def test_a_space_without_a_legal_point_names_the_rule_that_emptied_it(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]\n"
        "    schedules: [{tile: [[128, 512, 64], [128, 320, 64]]}]\n"
    )
    done = run(path, "--shapes", "16x64x64")
    assert done.exit_code == 1
    assert (
        "no legal schedule" in done.stderr
        and "must be what wgmma takes: multiples of 8" in done.stderr
    )


def test_shapes_that_no_schedule_of_the_space_can_store_are_named(
    space: Path, sweep: Path, tmp_path: Path
) -> None:
    path = tmp_path / "space.yaml"  # 208 accumulators leave no registers for direct stores
    path.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]\n"
        "    schedules: [{tile: [128, 208, 64], consumers: 1}]\n"
    )
    done = run(path, "--shapes", "16x6143x4096", "--replay", sweep, "--records", tmp_path / "r")
    assert done.exit_code == 1 and "add schedules with store: direct" in done.stderr


@pytest.mark.parametrize("damage", ["{", '{"schema": 9, "gpu": "x", "records": []}'])
def test_damaged_records_stop_a_run_before_it_measures(
    space: Path, sweep: Path, tmp_path: Path, damage: str
) -> None:
    records = tmp_path / "records.json"
    records.write_text(damage)
    done = run(space, "--shapes", ALL, "--records", records, "--replay", sweep)
    assert done.exit_code == 1 and "the file was not changed" in done.stderr
    assert records.read_text() == damage and not (tmp_path / "records.journal.jsonl").exists()


@pytest.mark.parametrize("other", ["records", "sweep", "a link to the sweep"])
def test_a_journal_is_no_other_file_of_the_run(
    space: Path, sweep: Path, tmp_path: Path, other: str
) -> None:
    """Records that are the journal waited a minute for it, and were lost; a sweep grew."""
    (tmp_path / "link").symlink_to(sweep)
    records, before = tmp_path / "records.json", sweep.read_bytes()
    path = {"records": records, "sweep": sweep}.get(other, tmp_path / "link")
    options = ("--records", records, "--replay", sweep, "--journal", path)
    done = run(space, "--shapes", SHAPES[0], *options)
    assert done.exit_code == 1 and f"--journal {path}: must be another file" in done.stderr
    assert not records.exists() and sweep.read_bytes() == before


def test_a_damaged_journal_stops_a_run_before_it_measures(
    space: Path, sweep: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("{}\nx\n")
    records = tmp_path / "records.json"
    done = run(space, "--shapes", ALL, "--records", records, "--replay", sweep, "--journal", log)
    assert done.exit_code == 1 and "a journal must be one JSON object to a line" in done.stderr
    assert log.read_text() == "{}\nx\n" and not records.exists()


def test_without_a_gpu_the_command_says_so(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(space, "--shapes", ALL, "--records", tmp_path / "records.json")
    assert done.exit_code == 1
    assert "no GPU" in done.stderr and "doctor" in done.stderr


def test_a_sweep_of_another_family_is_refused(sweep: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    space = root / "configs" / "attention_forward" / "space.yaml"
    done = run(space, "--cells", "--replay", sweep, "--records", tmp_path / "r.json")
    assert done.exit_code == 1 and "attention_forward" in done.stderr


def test_shapes_of_attention(tmp_path: Path) -> None:
    from warploom.tuning.problems import problems

    path = tmp_path / "space.yaml"
    kinds = (
        f"{{family: attention_forward, element: bf16, dim: 64{more}}}"
        for more in ("", ", mask: window", ", mask: causal, lengths: packed")
    )
    found = []
    for kind, shape in zip(
        kinds, ("2x8x2x512", "2x8x2x1x4096:window=128", "4x8x8x512:total=1024"), strict=True
    ):
        path.write_text(
            f"version: 1\narch: sm_90a\nkernels:\n  - operations: [{kind}]\n"
            "    schedules: [{q_tile: 128, kv_tile: 64}]\n"
        )
        found += problems(path, [shape])
    assert [one.shape.window for one in found] == [0, 128, 0]  # type: ignore[union-attr]
    assert [(one.shape.seq_q, one.shape.seq_k) for one in found] == [  # type: ignore[union-attr]
        *((512, 512), (1, 4096), (512, 512))
    ]
    assert found[2].shape.total_q == 1024  # type: ignore[union-attr]
    for bad, told in (
        ("4x8x8x512", "total=NUMBER"),
        ("4x8x8x512:total=99999", "longest"),
        ("4x8x8x512:window=12", "'window': must be total for bf16_dim64_causal_packed"),
        ("4x8x8x512:totl=1024", "did you mean total?"),
        ("4x8x8x512:total=many", "total 'many': must be an integer greater than 0"),
        ("4x8x8x512:total=1024:total=x", "total 'x': must be"),
        ("4x8x3x512:total=1024", "multiple of kv_heads"),
        ("4x8x8", "batchxheads"),
    ):
        done = run(path, "--shapes", bad)
        assert done.exit_code == 1 and told in done.stderr, done.stderr
    path.write_text(path.read_text().replace(", mask: causal, lengths: packed", ""))
    done = run(path, "--shapes", "1x8x8x512:windw=5")
    assert "'windw': must be left out for bf16_dim64_none_fixed" in done.stderr


def test_shipped_spaces_have_many_legal_points_for_every_cell() -> None:
    from warploom.generator.families import family
    from warploom.tuning.problems import problems

    root = Path(__file__).parents[2]
    for name, operations in (("space", 1), ("space_8bit", 3)):
        path = root / "configs" / "gemm" / f"{name}.yaml"
        few = problems(path, rows=(1, 8192))  # a space does not vary with m
        assert len(few) == operations * 10 * 2 and min(len(one.space) for one in few) > 500
        every = {shape for one in few for shape in family("gemm").cells(one.operation, None, ())}
        assert len(every) == 10 * 9
    scaled = problems(root / "configs" / "gemm" / "space_block_scales.yaml", rows=(1, 4096))
    assert len(scaled) == 11 * 2 + 2 and min(len(one.space) for one in scaled) > 200
    every = {shape for one in scaled for shape in family("gemm").cells(one.operation, None, ())}
    assert len(every) == 11 * 10 + 4 - 1  # 4096x4096x4096 is of both operations
    grouped = problems(root / "configs" / "gemm" / "space_grouped.yaml")
    assert len(grouped) == 2 * 3 * 7 + 2 and min(len(one.space) for one in grouped) > 5
    attention = problems(root / "configs" / "attention_forward" / "space.yaml")
    assert len(attention) == 35 and min(len(one.space) for one in attention) > 50
    eight = problems(root / "configs" / "attention_forward" / "space_8bit.yaml")
    assert len(eight) == 3 * (4 * 2 * 4 + 2) + 4 and min(len(one.space) for one in eight) > 11
    for name in ("attention_forward", "attention_backward"):
        apart = problems(root / "configs" / name / "space_two_dims.yaml")
        assert len(apart) == 2 * 5 and min(len(one.space) for one in apart) > 20
    backward = problems(root / "configs" / "attention_backward" / "space.yaml")
    assert len(backward) == 35 and min(len(one.space) for one in backward) > 3
    assert [one.shape for one in backward] == [one.shape for one in attention]
    for one in backward:  # what clusters share out are the query heads of a kv head
        clusters = {spec.schedule.cluster for spec in one.space}  # type: ignore[attr-defined]
        grouped = one.shape.sharing > 1  # type: ignore[union-attr]
        assert clusters == ({1, 2, 4, 8} if grouped else {1})
    assert any(one.shape.sharing > 1 for one in backward)  # type: ignore[union-attr]


def test_clusters_alone_are_no_space_where_heads_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: attention_backward, element: bf16, dim: 128}]\n"
        "    schedules: [{q_tile: 64, kv_tile: 128, overlap: false, cluster: [2, 4]}]\n"
    )
    assert [len(one.space) for one in problem_lists.problems(path, ["1x8x2x512"])] == [2]
    done = run(path, "--shapes", "1x8x8x512")
    assert done.exit_code == 1 and "add schedules with cluster: 1" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("attention", {"attention_forward", "attention_backward"}),
        ("attention_forward", {"attention_forward"}),
        ("attention_backward", {"attention_backward"}),
    ],
)
def test_attention_is_both_passes(
    name: str, families: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def enough() -> dict[str, Gpu]:
        raise DeviceError("enough")

    monkeypatch.setattr(tune, "_engines", lambda *_: Engines(enough, NoCompiler()))
    plain = problem_lists.problems

    def listed(*arguments: Any, **keywords: Any) -> list[Problem]:
        asked.extend(plain(*arguments, **keywords))
        return asked

    monkeypatch.setattr(problem_lists, "problems", listed)
    done = run(name, "--cells")
    assert done.exit_code == 1 and "enough" in done.stderr
    assert {one.operation.family for one in asked} == families
    assert len(asked) == 35 * len(families)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "NVIDIA H200"], "--kind NVIDIA H200 without --ray"),
        (["--ray", "--kind", ""], "'': must be a kind of GPU"),  # was the first one's
        (["--ray", " "], "' ': must be an address"),
        (["--ray", "local", "--replay", "sweep.jsonl", "--records", "r.json"], "--replay with"),
        (["--ray"], "pip install 'warploom[fleet]'"),
        (["--ray", "auto"], "--ray auto: Could not connect"),
        (["--ray", "127.0.0.1:9"], "--ray 127.0.0.1:9: [Errno 111] Connection refused"),
    ],
)
def test_what_a_cluster_is_asked_in_vain_is_told(
    options: list[str], message: str, space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not connect\nand many lines more")

    lost = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", lost if options[1:] else None)
    done = run(space, "--shapes", SHAPES[0], *options)
    assert done.exit_code == 1 and message in done.stderr, done.stderr


def test_the_sweep_is_of_the_gpu_it_says(listed: list[Problem]) -> None:
    assert {entry.environment.gpu for entry in entries(listed[0])} == {GPU}

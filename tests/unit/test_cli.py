"""The `warploom` command end to end: what each part of it says, and how it exits."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from warploom.cli import main
from warploom.errors import CompilationError
from warploom.generator import toolchain
from warploom.generator.artifact import Artifact
from warploom.generator.build import build_many
from warploom.generator.epilogue import STEPS
from warploom.generator.families import every, names
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import parse_name
from warploom.generator.store_directory import Directory
from warploom.generator.store_record import Record

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "configs" / "gemm" / "smoke.yaml"
SPECS = expand_file(SMOKE).specs
SMALL = """version: 1
arch: sm_90a
kernels:
  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]
    schedules: [{tile: [[64, 64, 64], [96, 64, 64]], consumers: 1}]
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def report(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_list_gives_the_names_in_the_order_of_the_file() -> None:
    listed = report("list", SMOKE)
    assert [row["name"] for row in listed["kernels"]] == [spec.name for spec in SPECS]
    assert (listed["legal"], listed["rejected"]) == (len(SPECS), 0)


def test_list_off_a_terminal_is_the_names_alone(small: Path) -> None:
    (name,) = report("list", small)["kernels"]
    assert run("list", small).stdout == f"{name['name']}\n"
    assert run("list", small).stderr == "legal: 1\nrejected: 1\n"
    assert run("list", small, "--quiet").stderr == ""


def test_a_configuration_may_come_from_standard_input(small: Path) -> None:
    command = [sys.executable, "-m", "warploom", "list", "-"]
    done = subprocess.run(command, input=SMALL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, run("list", small).stdout)
    refused = run("list", "")
    assert refused.exit_code == 1 and "must be the path of a configuration" in refused.stderr


def test_list_rejected_gives_the_reasons(small: Path) -> None:
    listed = report("list", small, "--rejected")
    (row,) = listed["rejections"]
    assert row["operation"] == "bf16_bf16_bf16_row_col_fast"
    assert row["schedule"].startswith("96x64x64_")
    assert row["reason"] == "tile m 96: must be one of 64, 128, 256"
    assert (listed["legal"], listed["rejected"]) == (1, 1)


@pytest.mark.parametrize("command", ["list", "emit", "compile"])
def test_a_bad_file_is_the_users_error_with_its_line(command: str, small: Path) -> None:
    small.write_text(SMALL.replace("bf16", "bf17", 1))
    result = run(command, small)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f'{small}:4: kernels[0].operations[0].a: "bf17": should be' in result.stderr
    assert run(command, small.with_name("none.yaml")).exit_code == 1


def test_emit_writes_each_kernel_once_and_leaves_what_is_current(
    small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "some" / "folder"
    (row,) = report("emit", small, "--out", out)["files"]
    (file,) = out.iterdir()
    assert row == {"file": file.name, "lines": len(file.read_text().splitlines())}
    assert file.read_text() == render(parse_name(file.stem))
    written = file.stat().st_mtime_ns
    assert run("emit", small, "--out", out).exit_code == 0
    assert file.stat().st_mtime_ns == written


def test_emit_tells_of_files_that_it_did_not_write(small: Path, tmp_path: Path) -> None:
    (tmp_path / "old.cu").write_text("")
    assert ".cu files of other kernels, 1 of them" in run("emit", small, "--out", tmp_path).stderr
    assert run("emit", small, "--out", tmp_path, "-q").stderr == ""


def test_emit_check_names_what_is_stale_missing_and_extra(small: Path, tmp_path: Path) -> None:
    small.write_text(SMALL.replace("[96, 64, 64]", "[64, 96, 64]"))
    out = tmp_path / "emitted"
    assert run("emit", small, "--out", out).exit_code == 0
    assert run("emit", small, "--out", out, "--check").exit_code == 0
    gone, changed = sorted(out.iterdir())
    gone.unlink()
    changed.write_text("// edited by hand\n")
    (out / "other.cu").write_text("")
    result = run("emit", small, "--out", out, "--check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["differences"] == [
        {"state": "missing", "file": gone.name},
        {"state": "extra", "file": "other.cu"},
        {"state": "stale", "file": changed.name},
    ]
    assert changed.read_text() == "// edited by hand\n"


def test_emit_takes_several_files_whose_kernels_lie_together(small: Path, tmp_path: Path) -> None:
    """One by one, each file's kernels are extra to the next one's check."""
    other, out = tmp_path / "other.yaml", tmp_path / "emitted"
    other.write_text(SMALL.replace("bf16", "fp16"))
    assert run("emit", small, other, "--out", out).exit_code == 0
    assert len([*out.iterdir()]) == 2
    assert run("emit", small, other, "--out", out, "--check").exit_code == 0
    assert run("emit", small, "--out", out, "--check").exit_code == 1


def test_emit_into_a_place_that_cannot_be_written_is_the_users_error(
    small: Path, tmp_path: Path
) -> None:
    result = run("emit", small, "--out", small / "under-a-file")
    assert (result.exit_code, "cannot be written: Not a directory" in result.stderr) == (1, True)


def test_compile_builds_all_and_then_finds_all(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_text(SMALL.replace("[96, 64, 64]", "[64, 96, 64]"))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    compiled = report("compile", small)
    assert {row["name"] for row in compiled["kernels"]} == {
        spec.name for spec in expand_file(small).specs
    }
    assert [row["name"] for row in compiled["kernels"] if not row["clean"]] == []
    assert (compiled["stored before"], compiled["compiled"]) == (0, 2)
    assert report("compile", small)["stored before"] == 2
    (directory,) = report("cache", "stats")["directories"]
    assert directory["kernels"] == 2


def refuse_after(kernels: int, patch: pytest.MonkeyPatch) -> None:
    """Let a disk be full once it has taken so many kernels."""
    written = Directory.write_cubin
    room = iter(range(kernels))

    def write_cubin(self: Directory, record: Record, cubin: bytes) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(self, record, cubin)

    patch.setattr(Directory, "write_cubin", write_cubin)


@pytest.mark.usefixtures("compiled_here")
def test_compile_that_stores_nothing_fails(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build step passed with an empty store, and production compiled or failed."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "file"))
    result = run("compile", small, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert (told["compiled"], told["stored"], told["failed"]) == (1, 0, 0)
    error = json.loads(result.stderr)
    assert error["type"] == "StoreError" and told["kernels"][0]["name"] in error["value"]
    assert "file cannot be written" in error["rule"] and "WARPLOOM_CACHE_DIR" in error["fix"]


@pytest.mark.usefixtures("compiled_here")
def test_compile_on_a_disk_that_fills_up_counts_what_is_stored_and_names_what_is_not(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_text(SMALL.replace("[96, 64, 64]", "[64, 96, 64]"))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    with monkeypatch.context() as patch:
        refuse_after(1, patch)
        result = run("compile", small, "-j", 1, "--json")
    told, error = json.loads(result.stdout), json.loads(result.stderr)
    assert (result.exit_code, told["compiled"], told["stored"]) == (1, 2, 1)
    assert "No space left on device" in error["rule"]
    missing = [row["name"] for row in told["kernels"] if row["name"] in error["value"]]
    (directory,) = report("cache", "stats")["directories"]
    assert (len(missing), directory["kernels"]) == (1, 1)
    again = report("compile", small)
    assert (again["stored before"], again["compiled"], again["stored"]) == (1, 1, 1)


@pytest.mark.usefixtures("compiled_here")
def test_show_gives_fields_resources_commands_and_source(private_store: Path) -> None:
    spec = SPECS[0]
    build_many([spec])
    shown = report("show", spec.name)
    assert shown["source"] == render(spec)
    assert (shown["digest"], shown["stored"]) == (spec.digest, True)
    assert shown["operation"]["epilogue"] == []
    assert shown["schedule"]["tile"] == [128, 256, 64]
    (resources,) = shown["resources"]
    assert resources["entry"] == spec.name
    assert (resources["registers"], resources["spill bytes"]) == (168, 0)
    nvcc = shown["reproduce"]["nvcc"].split()
    assert nvcc[:6] == [
        *["nvcc", "-cubin", "-arch=sm_90a", "-std=c++17", "--expt-relaxed-constexpr", "-DNDEBUG"]
    ]
    assert Path(nvcc[6].removeprefix("-I"), "cutlass", "version.h").is_file()
    assert nvcc[7:] == ["-o", f"{spec.name}.cubin", f"{spec.name}.cu"]


def test_a_compilation_that_is_stopped_says_what_is_stored(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Artifact("some", "sm_90a", b"", "", "", (), {}, (), 1.0)

    def stopped(
        specs: list[object],
        _store: object,
        _jobs: object,
        on_done: Callable[[object, object], None],
    ) -> None:
        for result in (artifact, CompilationError("bad", log="", source="")):
            on_done(specs[0], result)
        raise KeyboardInterrupt

    monkeypatch.setattr("warploom.generator.build.build_many", stopped)
    result = run("compile", small)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Stopped: 1 of 1 kernels are stored; the same command goes on" in result.stderr


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.usefixtures("small_sets")
def test_show_takes_a_digest_and_a_file_of_the_name(small: Path) -> None:
    spec = SPECS[3]
    for written in (spec.digest[:8], spec.digest, f"some/{spec.name}.cu", f"{spec.name}.cubin"):
        assert run("show", "--source", written).stdout == render(spec)
    small.write_text(SMALL.replace("consumers: 1", "consumers: 1, swizzle_size: 7"))
    own = expand_file(small).specs[0]
    missing = run("show", own.digest)
    assert missing.exit_code == 1 and "give the kernel's name, or with --in" in missing.stderr
    assert report("show", own.digest[:8], "--in", small)["name"] == own.name
    report("compile", small)  # from then on it is in the store
    assert report("show", own.digest[:8])["name"] == own.name


def test_show_source_is_the_file_that_emit_writes() -> None:
    assert run("show", "--source", SPECS[0].name).stdout == render(SPECS[0])


def test_show_works_without_a_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise toolchain.ToolchainError("NVRTC: not found", rule="it is needed", fix="install it")

    monkeypatch.setattr(toolchain, "find", missing)
    result = run("show", SPECS[0].name)
    assert result.exit_code == 0
    assert "toolchain: NVRTC: not found: it is needed: install it" in result.stdout


@pytest.mark.usefixtures("small_sets")
def test_an_unknown_name_is_the_users_error() -> None:
    result = run("show", "gemm_of_another_kind")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "kernel name 'gemm_of_another_kind'" in result.stderr
    assert "`warploom list FILE` prints the names" in result.stderr


def test_schema_is_the_tracked_file_and_check_sees_when_it_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("schema").stdout == (ROOT / "configs" / "schema.json").read_text()
    assert report("schema")["schema"] == json.loads(run("schema").stdout)
    assert report("schema", "--check") == {"up to date": True}
    (tmp_path / "schema.json").write_text("{}")
    monkeypatch.setattr("warploom.cli.schema.files", lambda package: tmp_path)
    result = run("schema", "--check")
    assert result.exit_code == 1
    assert "`warploom schema > configs/schema.json` renews it" in result.stdout


def test_schema_in_markdown_has_a_row_for_every_field_and_step() -> None:
    tables = run("schema", "--markdown").stdout
    assert report("schema", "--markdown") == {"reference": tables.removesuffix("\n")}
    rows = [line.split(" | ") for line in tables.splitlines() if line.startswith("| `")]
    first = [row[0].removeprefix("| ").strip("`") for row in rows]
    steps = list(dict.fromkeys(step.step for step in STEPS))  # of each family that has them
    sources = [kind for known in every() for kind in (known.operation, known.schedule)]
    expected = [field.name for source in sources for field in fields(source)]
    assert sorted(first) == sorted([*expected, *steps * expected.count("epilogue")])
    assert all(row[-1].removesuffix(" |").strip() for row in rows)
    field = "| `stages` | an integer 2 to 32, or `auto` | `auto` | k tiles that the shared-memory"
    assert field in tables
    assert "| `swap_ab` | `false`, `true` | `false` |" in tables
    assert "| `cluster` | a list of 2 integers | `[1, 1]` |" in tables


def test_schema_write_puts_the_tables_between_the_markers_and_leaves_the_rest(
    tmp_path: Path,
) -> None:
    file = tmp_path / "some.md"
    marked = "before\n<!-- fields of {0}: begin -->\n{1}\n<!-- fields of {0}: end -->\nafter\n"
    file.write_text("".join(marked.format(name, "old") for name in names()))
    assert run("schema", "--write", file).exit_code == 0
    tables = run("schema", "--markdown").stdout.removesuffix("\n")
    parts = re.split(r"\n\n(?=\*\*An operation of)", tables)
    assert file.read_text() == "".join(map(marked.format, names(), parts))
    file.write_text("no markers\n")
    result = run("schema", "--write", file)
    assert (result.exit_code, file.read_text()) == (1, "no markers\n")
    assert "has no <!-- fields of FAMILY: begin -->" in result.stderr

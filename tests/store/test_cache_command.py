"""`warploom cache`: what each command reports, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from warploom.cli import output
from warploom.cli.cache import command
from warploom.cli.units import Bytes, parse_bytes
from warploom.generator.artifact import Artifact
from warploom.generator.store import Store

MakeArtifact = Callable[..., Artifact]
KeyOf = Callable[[Artifact], str]


@pytest.fixture
def stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_artifact: MakeArtifact, key_of: KeyOf
) -> Artifact:
    """Return the one artifact in the store of the environment."""
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.delenv("WARPLOOM_CACHE_PATH", raising=False)
    artifact = make_artifact()
    Store.default().put(key_of(artifact), artifact)
    return artifact


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_stats_counts_kernels(stored: Artifact, tmp_path: Path) -> None:
    (row,) = json.loads(invoke("stats", "--json").stdout)["directories"]
    assert row["path"] == str(tmp_path / "store")
    assert (row["kernels"], row["objects"], row["quarantined"]) == (1, 1, 0)
    assert row["bytes"] > len(stored.cubin)
    assert str(tmp_path / "store") in invoke("stats").stdout


def test_explain_says_present_and_otherwise_what_differs(stored: Artifact, key_of: KeyOf) -> None:
    found = json.loads(invoke("explain", key_of(stored), "--json").stdout)
    assert (found["present"], found["key"]) == (True, key_of(stored))
    arguments = ("--name", stored.name, "--toolchain", "old", "--option", "-O0")
    missed = json.loads(invoke("explain", *arguments, "--json").stdout)
    assert missed["present"] is False
    assert {row["field"]: (row["wanted"], row["stored"]) for row in missed["nearest"]} == {
        "toolchain": ("old", stored.toolchain),
        "options": (["-O0"], list(stored.options)),
    }
    assert stored.toolchain in invoke("explain", *arguments).stdout


def test_explain_without_anything_to_look_for_fails_with_advice(stored: Artifact) -> None:
    result = invoke("explain")
    assert result.exit_code == 1
    assert "--name" in result.stderr


def test_export_and_import_move_kernels(
    stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_of: KeyOf
) -> None:
    path = tmp_path / "kernels.tar"
    assert json.loads(invoke("export", path, "--json").stdout) == {"kernels": 1}
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "other"))
    assert json.loads(invoke("import", path, "--json").stdout) == {"kernels": 1}
    assert Store(tmp_path / "other").get(key_of(stored)) == stored
    path.write_bytes(b"noise")
    result = invoke("import", path)
    assert result.exit_code == 1
    assert "export it again" in result.stderr


@pytest.mark.parametrize("variable", ["WARPLOOM_CACHE_DIR", "WARPLOOM_CACHE_PATH"])
def test_an_export_of_an_unusable_directory_fails_instead_of_writing_an_empty_archive(
    variable: str, stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exited with 0 and "kernels 0", so that a deployment without its kernels looked whole."""
    path, file = tmp_path / "kernels.tar", tmp_path / "file"
    file.touch()
    monkeypatch.setenv(variable, str(file))
    result = invoke("export", path)
    assert result.exit_code == 1
    assert f"{file}: " in result.stderr and f"another one in {variable}" in result.stderr
    assert not path.exists()


@pytest.mark.parametrize("command", ["import", "gc"])
def test_what_writes_to_an_unusable_directory_names_it_and_the_reason(
    command: str, stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They said "a store in memory only", which nobody had asked for."""
    path, file = tmp_path / "kernels.tar", tmp_path / "file"
    assert invoke("export", path).exit_code == 0
    file.touch()
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(file))
    result = invoke(command, *[path] * (command == "import"))
    assert result.exit_code == 1
    assert f"{file}: Not a directory" in result.stderr and "WARPLOOM_CACHE_DIR" in result.stderr


def test_the_help_of_import_says_that_it_is_trusting() -> None:
    assert "Importing is trusting" in invoke("import", "--help").stdout


def test_gc_empties_a_store_when_told_to(stored: Artifact, key_of: KeyOf) -> None:
    assert json.loads(invoke("gc", "--older-than", 1, "--json").stdout)["kernels"] == 0
    collected = json.loads(invoke("gc", "--max-bytes", 0, "--json").stdout)
    assert collected["kernels"] == 1
    assert collected["bytes"] > len(stored.cubin)
    assert Store.default().get(key_of(stored)) is None


@pytest.mark.parametrize(
    ("written", "bytes_"),
    [("0", 0), ("500", 500), ("1.5kB", 1500), ("2 GB", 2 * 10**9), ("1GiB", 1 << 30), ("3m", 3e6)],
)
def test_bytes_are_written_as_people_do(written: str, bytes_: int) -> None:
    assert parse_bytes(written) == bytes_


@pytest.mark.parametrize("limit", ["1,000,000", "1.2.3", "-1", "nan", "GB", "1e9", "5 apples", ""])
def test_a_limit_that_is_no_number_of_bytes_removes_nothing(limit: str, stored: Artifact) -> None:
    result = invoke("gc", f"--max-bytes={limit}")
    assert result.exit_code != 0
    assert "500MB, 2GiB" in result.output
    assert Store.default().stats().directories[0].kernels == 1


@pytest.mark.parametrize("limit", ["nan", "inf"])
def test_an_age_that_is_not_finite_removes_nothing(limit: str, stored: Artifact) -> None:
    result = invoke("gc", "--older-than", limit)
    assert result.exit_code == 1
    assert "must be finite" in result.stderr
    assert Store.default().stats().directories[0].kernels == 1


def test_bytes_have_units_for_people_and_none_for_programs(
    stored: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = json.loads(invoke("stats", "--json").stdout)["directories"]
    assert type(row["bytes"]) is int
    assert f"\t{row['bytes']}\t" in invoke("stats").stdout
    monkeypatch.setattr(output, "width", lambda: 300)
    assert f"  {Bytes(row['bytes'])}  " in invoke("stats").stdout
    assert (str(Bytes(1)), str(Bytes(178_064))) == ("1 byte", "178.1 kB")

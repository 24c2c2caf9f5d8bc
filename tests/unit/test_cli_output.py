"""The command line's contract: one JSON object, errors on standard error, fixed exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from warploom.cli import main
from warploom.cli.output import Output, reporting
from warploom.errors import ResultError, StoreError, ToolchainError, WarploomError


def run(error: WarploomError | None, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a small command that raises `error`."""

    @click.command()
    @click.argument("path", type=click.Path(path_type=Path))
    @reporting
    def command(output: Output, path: Path) -> None:
        output.line("for people")
        output.table("kernels", ["name", "registers"], [["plain", 8], ["relu", 168]])
        output.value("folder", path)
        with output.progress("compiling", total=1) as advance:
            advance("plain")
        if error is not None:
            raise error

    result = CliRunner().invoke(command, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_text_off_a_terminal_is_aligned_and_has_no_escape_codes() -> None:
    lines = ["for people", "name   registers", "plain          8", "relu         168"]
    assert run(None, "here") == (0, "\n".join([*lines, "folder: here", ""]), "")


def test_json_is_one_object_without_the_lines_for_people() -> None:
    code, stdout, stderr = run(None, "here", "--json")
    rows = [{"name": "plain", "registers": 8}, {"name": "relu", "registers": 168}]
    assert (code, stderr) == (0, "")
    assert json.loads(stdout) == {"kernels": rows, "folder": "here"}


@pytest.mark.parametrize(
    ("error", "code"), [(StoreError("s"), 1), (ToolchainError("t"), 2), (ResultError("r"), 3)]
)
def test_exit_code_follows_the_error_class(error: WarploomError, code: int) -> None:
    assert run(error, "here")[0] == code


def test_error_keeps_what_was_reported_before_it_and_names_its_parts() -> None:
    error = ToolchainError("CCCL 13.2", rule="13.0 or 13.1", fix="install 13.1")
    _, stdout, stderr = run(error, "here", "--json")
    assert len(json.loads(stdout)["kernels"]) == 2
    parts = {"value": "CCCL 13.2", "rule": "13.0 or 13.1", "fix": "install 13.1"}
    assert json.loads(stderr) == {"type": "ToolchainError", **parts}
    assert run(error, "here")[2] == "Error: CCCL 13.2: 13.0 or 13.1: install 13.1\n"


@pytest.mark.parametrize("arguments", [["no-such-command"], ["cache", "--no-such-option"]])
def test_wrong_usage_is_the_users_input_and_not_a_compilation_failure(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 1

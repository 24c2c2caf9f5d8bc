"""The command line's contract: one JSON object, errors on standard error, fixed exit codes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from warploom.cli import EXIT_CODES, main, output, progress
from warploom.cli.output import Output, Terminated, reporting
from warploom.cli.table import aligned
from warploom.errors import CompilationError, ResultError, StoreError, ToolchainError, WarploomError
from warploom.variables import VARIABLES


def run(error: BaseException | None, *arguments: str) -> tuple[int, str, str]:
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


def test_off_a_terminal_tables_are_their_values_alone_and_whole() -> None:
    lines = ["for people", "plain\t8", "relu\t168", "folder: here"]
    assert run(None, "here") == (0, "\n".join([*lines, ""]), "")


NAME = "gemm_" + "x" * 90


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_on_a_terminal_tables_fit_and_names_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(output, "width", lambda: columns)

    @click.command()
    @reporting
    def command(output: Output) -> None:
        numbers = ("shared bytes", "registers", "compile seconds", "cubin bytes")
        header = ["digest", "tile", *numbers, "name"]
        output.table("kernels", header, [["3a7e5d29", "128x128x64", 230400, 168, 3.3, 8064, NAME]])

    lines = CliRunner().invoke(command).stdout.splitlines()
    assert [line for line in lines if line.split()[-1] == NAME], lines
    assert all(len(line) <= columns for line in lines if line.strip() != NAME)
    assert lines[0].split()[0] == "digest" or lines[1].split()[0] == "digest"


def test_what_does_not_fit_even_so_is_a_block_a_row() -> None:
    columns, row = ["key", "place", "field", "wanted"], ["a" * 64, "b" * 30, "c", "d"]
    lines = list(aligned(columns, [row, row], [False] * 4, 80))
    assert lines[:2] == ["key     " + "a" * 64, "place   " + "b" * 30]
    assert (len(lines), lines[3], lines[4]) == (9, "wanted  d", "")


def test_a_list_of_names_has_a_name_a_line_however_long() -> None:
    assert list(aligned(["name"], [[NAME], [NAME]], [False], 80)) == [NAME, NAME]


def test_a_sentence_below_its_row_is_wrapped_between_words() -> None:
    reason = "tile m 96: must be 64, 128 or 256"
    lines = list(aligned(["schedule", "reason"], [["s" * 20, reason]], [False, False], 30))
    assert lines == ["schedule", "s" * 20, "  tile m 96: must be 64, 128", "  or 256"]


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


def test_a_kernel_that_does_not_compile_leaves_log_and_source_in_files() -> None:
    error = CompilationError("some", log="some.cu(1): error: no\nand more", source="source")
    _, _, stderr = run(error, "here")
    assert "error's `log`" not in stderr and "and more" not in stderr
    paths = dict(line.split() for line in stderr.splitlines()[1:])
    assert Path(paths["log"]).read_text() == error.log
    assert Path(paths["source"]).read_text() == "source"
    assert "and more" in run(error, "here", "--verbose")[2]
    _, stdout, stderr = run(error, "here", "--json")
    assert json.loads(stdout)["log of some"] == error.log
    assert Path(json.loads(stderr)["log"]).is_file()


def test_json_has_no_word_that_only_python_reads(capsys: pytest.CaptureFixture[str]) -> None:
    said = Output(as_json=True)
    said.table("t", ["seconds"], [[math.inf], [math.nan], [0.5]])
    said.close()
    seconds = [row["seconds"] for row in json.loads(capsys.readouterr().out)["t"]]
    assert seconds == [sys.float_info.max, None, 0.5]


def test_ctrl_c_and_sigterm_have_codes_of_their_own() -> None:
    for signalled, code in ((KeyboardInterrupt(), 130), (Terminated(), 143)):
        assert run(signalled, "here")[::2] == (code, "Stopped.\n")


def test_without_a_terminal_a_line_now_and_then_says_how_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with progress.watched("compiling", 4) as watch:
        for done in range(1, 5):
            watch(done, f"kernel{done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["compiling 2/4, 6 s: kernel2", "compiling 4/4, 12 s: kernel4"]


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_bar_count_and_time_are_there_beside_the_longest_name(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with progress.watched("compiling", 1252) as watch:
        watch(31, NAME)
    drawn = [click.unstyle(text) for text in re.split(r"[\r\n]+", terminal.getvalue())]
    (line,) = {text.rstrip() for text in drawn if "31/1252" in text}
    assert "━" in line and " left gemm_x" in line and "…" in line
    assert len(line) < columns - 2  # a ^C goes behind it


def test_a_name_is_cut_in_the_middle() -> None:
    assert progress.middle("gemm_abcdef_12345678", 12) == "gemm_a…45678"
    assert [progress.middle("abc", width) for width in (3, 2, 1, 0)] == ["abc", "a…", "…", ""]


def test_error_keeps_what_was_reported_before_it_and_names_its_parts() -> None:
    error = ToolchainError("CCCL 13.2", rule="13.0 or 13.1", fix="install 13.1")
    _, stdout, stderr = run(error, "here", "--json")
    assert len(json.loads(stdout)["kernels"]) == 2
    parts = {"value": "CCCL 13.2", "rule": "13.0 or 13.1", "fix": "install 13.1"}
    assert json.loads(stderr) == {"type": "ToolchainError", **parts}
    assert run(error, "here")[2] == "Error: CCCL 13.2: 13.0 or 13.1: install 13.1\n"


WRITES = "import sys; from warploom.cli import main; main(sys.argv[1:])"


FULL = "Error: standard output: No space left on device"


@pytest.mark.parametrize(
    ("arguments", "where", "code", "told"),
    [
        (["schema"], "> /dev/full", 1, FULL),
        (["schema", "--json"], "> /dev/full", 1, FULL),
        (["--help"], "> /dev/full", 1, FULL),
        (["schema", "--json"], ">&-", 0, ""),
        (["schema"], "| true", 141, ""),  # which ends at once
        (["--help"], "| true", 141, ""),
    ],
    ids=str,
)
def test_output_that_cannot_be_written_is_no_traceback(
    arguments: list[str], where: str, code: int, told: str
) -> None:
    command = shlex.join([sys.executable, "-c", WRITES, *arguments])
    late = "sleep 0.3; " if "true" in where else ""
    line = f"set -o pipefail; {{ {late}{command}; }} {where}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == told
    assert done.returncode == code or (arguments == ["--help"] and done.returncode == 1)


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    program = """
import os, signal, sys, click
from warploom.cli import main, output

@click.command("stop")
@output.reporting
def stop(output):
    os.kill(os.getpid(), int(sys.argv[2]))

signal.signal(signal.SIGINT, signal.default_int_handler)  # else nohup's is inherited
main.add_command(stop)
main.get_command = lambda context, name: stop
main(["stop"])
"""
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        command = [sys.executable, "-c", program, "stop", str(int(number))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, "Stopped.\n")


def test_completion_names_commands_options_spaces_and_files() -> None:
    def completed(*words: str) -> list[str]:
        variables = {
            "_WARPLOOM_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["warploom", *words]),
            "COMP_CWORD": str(len(words)),
        }
        program = "from warploom.cli import main; main(prog_name='warploom')"
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert completed("do") == ["plain,doctor"]
    assert completed("compile", "--js") == ["plain,--json"]
    assert "file,conf" in completed("emit", "conf")
    assert {"plain,gemm", "plain,gemm_8bit"} <= {*completed("tune", "gem")}


def test_the_help_has_whole_sentences_all_variables_and_all_codes() -> None:
    told = CliRunner().invoke(main, ["-h"], terminal_width=80).stdout
    assert "..." not in told.replace("[ARGS]...", "") and "…" not in told
    assert all(name in told for name in VARIABLES)
    assert re.findall(r"^  (\d+)  ", told, re.MULTILINE) == list(map(str, EXIT_CODES))


def test_several_errors_are_a_list_for_a_program(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 2\narch: sm_1\nkernels: []\n")
    done = CliRunner().invoke(main, ["list", str(tmp_path / "bad.yaml"), "--json"])
    errors = json.loads(done.stderr)["errors"]
    assert len(errors) > 1 and all("bad.yaml:" in error for error in errors)


def test_wrong_usage_is_an_object_for_a_program() -> None:
    done = CliRunner().invoke(main, ["list", "--no-such-option", "--json"])
    told = json.loads(done.stderr)
    assert (done.exit_code, told["type"]) == (1, "NoSuchOption")
    assert "--no-such-option" in told["value"]
    assert (
        CliRunner()
        .invoke(main, ["bench", "--no-such-option", "--json", "f"])
        .stderr.startswith("Usage: ")
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["emit", "linear.yaml", "--out", ""],  # which filled the working directory
        ["tune", "gemm", "--records", ""],  # which was a traceback
        ["bench", "gemm", "--json", ""],
        ["bench", "gemm", "--plot", ""],
        ["records", "merge", "", "mine.json"],
        ["report", "c2b9e29c", "--out", ""],
        ["cache", "export", ""],
    ],
)
def test_a_path_of_an_unset_variable_is_no_folder(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.stdout) == (1, "") and "'': must be a path" in done.stderr


@pytest.mark.parametrize("arguments", [["no-such-command"], ["cache", "--no-such-option"]])
def test_wrong_usage_is_the_users_input_and_not_a_compilation_failure(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 1


def test_what_others_wrote_reaches_no_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;owned\x07"
    said = Output(as_json=False)
    said.line(hostile)
    said.value("name", hostile)
    said.value("names", {hostile: hostile})
    said.table("table", ["name"], [[hostile]])
    said.warning(hostile)
    said.error(WarploomError(hostile, rule=hostile, fix=hostile))
    captured = capsys.readouterr()
    assert (captured.out + captured.err).isascii() and "\x1b" not in captured.out + captured.err
    assert captured.out.count("\\x1b]0;owned\\x07") == 5
    assert "\x1b" not in str(WarploomError(hostile))

"""The one place that decides how a command speaks: text, tables, progress, JSON and errors.

A command module exposes `command`, and reports only through the `Output` it is handed:

    @click.command("list")
    @click.argument("path", type=FILE)
    @reporting
    def command(output: Output, path: Path) -> None:
        \"\"\"Show the kernels that a configuration expands to.\"\"\"
        output.table("kernels", ["name", "registers"], [["NAME", 168]])

`reporting` stands directly above the function and adds `--json`, `-q` and `-v`. With `--json`,
standard output is exactly one JSON object, with a key per table, value and text. Off a terminal, it
is the rows of tables and the values, whole, and totals go to standard error. Raise a WarploomError
to fail: its message goes to standard error (an object with type, value, rule and fix under
`--json`), its `exit_code` ends the process, and what was reported before it is still shown. To fail
without a message of one's own, set `output.exit_code`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Concatenate, ParamSpec

import click

from warploom import line_json, log
from warploom.cli.progress import Watch, watched
from warploom.cli.table import aligned, separated
from warploom.errors import CompilationError, WarploomError
from warploom.printable import printable

Parameters = ParamSpec("Parameters")


class Terminated(KeyboardInterrupt):
    """SIGTERM: what stops a command as Ctrl-C does, with an exit code of its own."""


def ended_by(signalled: BaseException | None) -> int:
    """The exit code of a command that a signal ended."""
    return 128 + (signal.SIGTERM if isinstance(signalled, Terminated) else signal.SIGINT)


def width() -> int | None:
    """The columns of the terminal that standard output is; None where it is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


class Output:
    """What one run of a command says, to a person or, with `as_json`, to a program.

    Values are whatever JSON holds, and also paths and dataclasses. In text a float has four
    significant digits, None is `-`, and booleans are `yes` and `no`. `quiet` leaves out progress,
    totals and warnings, `verbose` adds the log and those of the compiler. What is
    `for_people` has headers and totals off a terminal too.
    """

    def __init__(self, *, as_json: bool, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.for_people = False
        self.exit_code = 0
        self._document: dict[str, object] = {}

    def line(self, text: str) -> None:
        """Say one line to a person; JSON does not have it."""
        if not self.as_json:
            _say(text)

    def document(self, name: str, value: object) -> None:
        """Give a value to a program alone; a person was told by lines."""
        self._document[name] = value

    def text(self, name: str, text: str) -> None:
        """Give a whole text verbatim, such as a source: JSON key `name`."""
        self._document[name] = text
        self.line(text.removesuffix("\n"))

    def value(self, name: str, value: object) -> None:
        """Give one value as `name: value`, or a mapping as one aligned line per entry."""
        self._document[name] = value
        for line in _lines(name, value):
            self.line(line)

    def total(self, name: str, value: object) -> None:
        """Give a value that sums up a table: off a terminal it is no part of the output."""
        self._document[name] = value
        aside = width() is None and not self.for_people
        if self.as_json or (self.quiet and aside):
            return
        for line in _lines(name, value):
            _say(line, err=aside)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Give rows under named columns: in JSON a list, at key `name`, of an object per row.

        A column of names or sentences belongs last: where it does not fit, it goes below its row.
        """
        self._document[name] = [dict(zip(columns, row, strict=True)) for row in rows]
        if self.as_json:
            return
        numeric = [
            any(isinstance(row[index], int | float) for row in rows)
            for index in range(len(columns))
        ]
        if width() is None and not self.for_people:
            lines = separated([[_bare(value) for value in row] for row in rows])
        else:
            cells = [[_text(value) for value in row] for row in rows]
            lines = aligned(columns, cells, numeric, width())
        for line in lines:
            _say(line)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[str], None]]:
        """Show on standard error how many of `total` units are done (0: who knows how many).

        Yields the function to call, with the name of the unit, as each unit ends.
        """
        with self.watching(text, total) as watch:
            done = 0

            def advance(unit: str) -> None:
                nonlocal done
                done += 1
                watch(done, unit)

            yield advance

    @contextmanager
    def watching(self, text: str, total: int, *, estimate: bool = True) -> Iterator[Watch]:
        """Show on standard error how a long run stands; `estimate`: and how much time is left.

        Yields the function to call with how many of `total` are done, and what is to be said. The
        log has a line for each kernel, and takes the place of this where it is shown.
        """
        logged = logging.getLogger("warploom").isEnabledFor(logging.INFO)
        if self.as_json or self.quiet or logged:
            yield lambda _done, _text: None
            return
        with watched(text, total, estimate=estimate) as watch:
            yield watch

    def warning(self, text: str) -> None:
        """Say something on standard error that nobody should miss."""
        _say(text, err=True)

    def note(self, text: str) -> None:
        """Say something on standard error, unless the user asked for quiet, or for JSON."""
        if not (self.quiet or self.as_json):
            _say(text, err=True)

    def error(self, error: WarploomError) -> None:
        """Put `error` on standard error and take its exit code."""
        self.exit_code = error.exit_code
        fields = {"value": error.value, "rule": error.rule, "fix": error.fix}
        if isinstance(error, CompilationError):
            fields |= _kept(error)
            self._document[f"log of {error.name}"] = error.log
        if self.as_json:
            each = {"errors": lines} if len(lines := error.value.splitlines()) > 1 else {}
            _say(json.dumps({"type": type(error).__name__, **fields, **each}), err=True)
            return
        _say("Error: " + ": ".join(filter(None, list(fields.values())[:3])), err=True)
        for name, path in list(fields.items())[3:]:
            _say(f"  {name:<6}  {path}", err=True)
        if self.verbose and isinstance(error, CompilationError):
            _say(error.log, err=True)

    def stopped(self, signalled: KeyboardInterrupt, text: str = "") -> None:
        """Say that a signal ended the command, and what became of its work."""
        self.exit_code = ended_by(signalled)
        _say(f"Stopped: {text}" if text else "Stopped.", err=True)

    def close(self) -> None:
        """Print the JSON object, once everything has been reported."""
        if self.as_json:
            _say(json.dumps(line_json.finite(self._document, _json), indent=2))


def reporting(
    function: Callable[Concatenate[Output, Parameters], None],
) -> Callable[Parameters, None]:
    """Add `--json`, `-q` and `-v` to a command, and do as `reporting_text` does."""
    flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    return flag(reporting_text(function))


def reporting_text(
    function: Callable[Concatenate[Output, Parameters], None],
) -> Callable[Parameters, None]:
    """Hand a command its Output, and turn WarploomError and signals into an exit code.

    This is `reporting` for a command whose `--json` is an option of its own: a file.
    """

    @click.option("-q", "--quiet", is_flag=True, help="No progress, totals or warnings.")
    @click.option("-v", "--verbose", count=True, help="Log what is done; -vv: more of it.")
    @functools.wraps(function)
    def wrapper(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        quiet, verbose = bool(options.pop("quiet")), int(str(options.pop("verbose")))
        output = Output(
            as_json=bool(options.pop("as_json", False)), quiet=quiet, verbose=bool(verbose)
        )
        level = "debug" if verbose > 1 else "info" if verbose else "error" if quiet else ""
        try:
            with log.at(level):
                try:
                    function(output, *arguments, **options)
                except WarploomError as error:
                    output.error(error)
                except KeyboardInterrupt as signalled:
                    output.stopped(signalled)
                output.close()
        except BrokenPipeError:  # as `head` does: it is told by the exit code alone
            output.exit_code = 128 + signal.SIGPIPE
        if output.exit_code:
            raise click.exceptions.Exit(output.exit_code)

    return wrapper


@functools.cache
def _folder() -> Path:
    """Where this process keeps the logs and sources of kernels that did not compile."""
    return Path(tempfile.mkdtemp(prefix="warploom-"))


def _kept(error: CompilationError) -> dict[str, str]:
    """Write the compiler's log and the source to files, and return their paths, as words of JSON.

    Empty where there is no room for them.
    """
    from warploom.generator import names

    kept = {"fix": ""}
    with suppress(OSError):
        for name, suffix, text in (("log", "log", error.log), ("source", "cu", error.source)):
            path = _folder() / names.file(error.name, suffix)
            path.write_text(text, encoding="utf-8")
            kept[name] = str(path)
    return kept


def _say(text: str, *, err: bool = False) -> None:
    """Print what a person reads, and what of it a terminal would act on as escapes."""
    click.echo(printable(text), err=err)


def _lines(name: str, value: object) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{name}: {_text(value)}"]
    longest = max((len(str(key)) for key in value), default=0)
    return [f"{key!s:<{longest}}  {_text(entry)}" for key, entry in value.items()]


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if not 1e4 <= abs(value) < 1e15 else f"{value:.0f}"
    return printable(str(value))


def _bare(value: object) -> str:
    """As `_text`, but integers have digits alone, whatever unit they are shown with."""
    return (
        str(int(value)) if isinstance(value, int) and not isinstance(value, bool) else _text(value)
    )


def _json(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")

"""The one place that decides how a command speaks: text, tables, progress, JSON and errors.

A command module exposes `command`, and reports only through the `Output` it is handed:

    @click.command("list")
    @click.argument("path", type=click.Path(path_type=Path))
    @reporting
    def command(output: Output, path: Path) -> None:
        \"\"\"Show the kernels that a configuration expands to.\"\"\"
        output.table("kernels", ["name", "registers"], [["gemm_...", 168]])

`reporting` stands directly above the function and adds `--json`: standard output is then exactly
one JSON object, with a key per table, value and text. Raise a WarploomError to fail: its message
goes to standard error (an object with type, value, rule and fix under `--json`), its `exit_code`
ends the process, and what was reported before it is still shown. To fail without a message of
one's own, set `output.exit_code`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec

import click

from warploom.errors import WarploomError

Parameters = ParamSpec("Parameters")


class Output:
    """What one run of a command says, to a person or, with `as_json`, to a program.

    Values are whatever JSON holds, and also paths and dataclasses. In text a float has four
    significant digits, None is `-`, and booleans are `yes` and `no`.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.exit_code = 0
        self._document: dict[str, object] = {}

    def line(self, text: str) -> None:
        """Say one line to a person; JSON does not have it."""
        if not self.as_json:
            click.echo(text)

    def text(self, name: str, text: str) -> None:
        """Give a whole text verbatim, such as a source: JSON key `name`."""
        self._document[name] = text
        self.line(text.removesuffix("\n"))

    def value(self, name: str, value: object) -> None:
        """Give one value as `name: value`, or a mapping as one aligned line per entry."""
        self._document[name] = value
        if isinstance(value, Mapping):
            width = max((len(str(key)) for key in value), default=0)
            for key, entry in value.items():
                self.line(f"{key!s:<{width}}  {_text(entry)}")
        else:
            self.line(f"{name}: {_text(value)}")

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Give rows under named columns: in JSON a list, at key `name`, of an object per row."""
        self._document[name] = [dict(zip(columns, row, strict=True)) for row in rows]
        if self.as_json:
            return
        numeric = [
            any(isinstance(row[index], int | float) for row in rows)
            for index in range(len(columns))
        ]
        cells = [[_text(value) for value in row] for row in rows]
        show = _rich_table if sys.stdout.isatty() else _plain_table
        show(name, columns, cells, numeric)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[str], None]]:
        """Show a bar on standard error over `total` units; only a terminal sees it.

        Yields the function to call, with the name of the unit, as each unit ends.
        """
        if self.as_json or not sys.stderr.isatty():
            yield lambda _unit: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(text, total=total)

            def advance(unit: str) -> None:
                bar.update(task, advance=1, description=f"{text} {unit}")

            yield advance

    @contextmanager
    def watching(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """Show how a long run stands on standard error; only a terminal sees it.

        Yields the function to call with how many of `total` are done, and what is to be said.
        """
        if self.as_json or not sys.stderr.isatty():
            yield lambda _done, _text: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=total)
            yield lambda done, text: bar.update(task, completed=done, description=text)

    def warning(self, text: str) -> None:
        """Say something on standard error that nobody should miss."""
        click.echo(text, err=True)

    def error(self, error: WarploomError) -> None:
        """Put `error` on standard error and take its exit code."""
        self.exit_code = error.exit_code
        message = str(error)
        if self.as_json:
            fields = {"value": error.value, "rule": error.rule, "fix": error.fix}
            message = json.dumps({"type": type(error).__name__, **fields})
        click.echo(message if self.as_json else f"Error: {message}", err=True)

    def close(self) -> None:
        """Print the JSON object, once everything has been reported."""
        if self.as_json:
            click.echo(json.dumps(self._document, indent=2, default=_json))


def reporting(
    function: Callable[Concatenate[Output, Parameters], None],
) -> Callable[Parameters, None]:
    """Add `--json` to a command, hand it its Output, and turn WarploomError into an exit code."""
    flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    return flag(reporting_text(function))


def reporting_text(
    function: Callable[Concatenate[Output, Parameters], None],
) -> Callable[Parameters, None]:
    """Do as `reporting` does, for a command whose `--json` is an option of its own: a file."""

    @functools.wraps(function)
    def wrapper(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        output = Output(as_json=bool(options.pop("as_json", False)))
        try:
            function(output, *arguments, **options)
        except WarploomError as error:
            output.error(error)
        output.close()
        if output.exit_code:
            raise click.exceptions.Exit(output.exit_code)

    return wrapper


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _json(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _plain_table(
    _name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        click.echo("  ".join(aligned).rstrip())


def _rich_table(
    name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=name)
    for column, right in zip(columns, numeric, strict=True):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)

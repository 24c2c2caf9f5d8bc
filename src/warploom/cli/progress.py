"""How a long run stands, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.progress import Task

SECONDS = 5.0  # between two lines, where there is no terminal

Watch = Callable[[int, str], None]  # called with how many units are done, and what is to be said


@contextmanager
def watched(text: str, total: int, *, estimate: bool = True) -> Iterator[Watch]:
    """Show how many of `total` units are done; 0 is a number that is not known.

    Without `estimate`, what is said tells the time that is left.
    """
    if sys.stderr is None:
        yield lambda _done, _said: None
    elif sys.stderr.isatty():
        with _bar(text, total, estimate=estimate) as watch:
            yield watch
    else:
        yield _lines(text, total)


def middle(text: str, width: int) -> str:
    """Return `text`, at most `width` characters of it: what is left out is in the middle."""
    if len(text) <= width:
        return text
    kept = max(0, width - 1)
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"[:width]


def _lines(text: str, total: int) -> Watch:
    started = said = time.monotonic()

    def watch(done: int, unit: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < SECONDS:
            return
        said = now
        count = f"{done}/{total}" if total else str(done)
        click.echo(f"{text} {count}, {now - started:.0f} s: {unit}", err=True)

    return watch


@contextmanager
def _bar(text: str, total: int, *, estimate: bool) -> Iterator[Watch]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    class Said(ProgressColumn):
        """What is said of the last unit, in the room that the others leave."""

        def render(self, task: Task) -> _Middle:
            return _Middle(task.fields["said"])

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=max(8, min(40, console.width // 6))),
        MofNCompleteColumn(),
        *((TimeRemainingColumn(compact=True), TextColumn("left")) if estimate else ()),
        Said(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total or None, said="")

        def watch(done: int, unit: str) -> None:
            bar.update(task, completed=done, said=unit)

        yield watch


class _Middle:
    """A text that takes what room it is given, but for that of a `^C`, and leaves out its middle.

    A terminal echoes that behind the bar; on a line of its own, it would keep the bar from going.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(middle(self.text, options.max_width), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        room = max(0, options.max_width - len("^C "))
        return Measurement(0, min(len(self.text), room))

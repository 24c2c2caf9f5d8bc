"""How tables are laid out in text: whole words always, so that what is shown can be copied.

Off a terminal a row is its values, separated by tabs, and there is no header. On one, columns are
aligned; where they do not fit, headers are wrapped, then the last columns go below their row, and
then each row becomes a block of lines. No word is ever broken or left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

_GAP = "  "
_BELOW = 2  # columns that may go below their row: of more, nobody would know which is which


def separated(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as one line for a program."""
    for row in rows:
        yield "\t".join(" ".join(cell.split()) for cell in row)


def aligned(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    width: int | None = None,
) -> Iterator[str]:
    """The lines of a table that fits `width` characters (None: any); its header comes first.

    One column needs none.
    """
    if not rows:
        return
    if len(columns) == 1:
        yield from (row[0] for row in rows)
        return
    room, header = width or 10**9, [[column] for column in columns]
    if _total(header, rows) <= room:
        yield from _lines(header, rows, numeric, room)
        return
    header = _wrapped(columns, rows)
    for count in range(len(columns), max(0, len(columns) - 1 - _BELOW), -1):
        if _total(header[:count], rows) <= room:
            yield from _lines(header[:count], rows, numeric, room)
            return
        if numeric[count - 1]:  # a number is nothing without its column
            break
    yield from _blocks(columns, rows)


def _wrapped(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [
        textwrap.wrap(
            column,
            max(1, *(len(row[index]) for row in rows), *map(len, column.split())),
            break_on_hyphens=False,
        )
        or [""]
        for index, column in enumerate(columns)
    ]


def _widths(header: Sequence[list[str]], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(*map(len, lines), *(len(row[index]) for row in rows))
        for index, lines in enumerate(header)
    ]


def _total(header: Sequence[list[str]], rows: Sequence[Sequence[str]]) -> int:
    return sum(_widths(header, rows)) + len(_GAP) * (len(header) - 1)


def _lines(
    header: Sequence[list[str]],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    room: int,
) -> Iterator[str]:
    """Rows under `header`; what is right of it goes below each row, wrapped between words."""
    count = len(header)
    widths, height = _widths(header, rows), max(map(len, header))

    def line(cells: Sequence[str]) -> str:
        return _GAP.join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=False)
        ).rstrip()

    for index in range(height):
        yield line([([""] * (height - len(lines)) + list(lines))[index] for lines in header])
    for row in rows:
        yield line(row[:count])
        for below in row[count:]:
            yield from _indented(below, room)


def _indented(text: str, room: int) -> list[str]:
    return textwrap.wrap(
        text,
        room,
        initial_indent=_GAP,
        subsequent_indent=_GAP,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _blocks(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    width = max(map(len, columns))
    for index, row in enumerate(rows):
        if index:
            yield ""
        for column, cell in zip(columns, row, strict=True):
            yield f"{column.ljust(width)}{_GAP}{cell}"

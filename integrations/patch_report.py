"""What a patch reports: a line for each kind of module, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

AS_IT_WAS = "as it was"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a patch's report: how many of what, what they are now, and why not on Warploom."""

    what: str
    count: int
    now: str
    because: str = ""


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as lines, in columns."""
    lines = [(f"{row.count} x {row.what}", row.now, row.because) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        texts = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        yield "  ".join(texts).rstrip()

"""The little Markdown that tables in documents need: drawing one, putting it in its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table, whose columns but the first are `numbers` or not."""
    rule = ["---", *["---:" if numbers else "---"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def insert(text: str, name: str, content: str) -> str:
    """Return `text` with `content` between the two markers of `name`; ValueError if it has none."""
    begins, ends = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = text.partition(begins)
    _, end, after = rest.partition(ends)
    if not (begin and end):
        raise ValueError(f"the text has no {begins} followed by {ends}")
    return f"{before}{begins}\n{content}\n{ends}{after}"

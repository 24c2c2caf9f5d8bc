"""Docstrings as the site shows them: columns of names and meanings become lists.

An extension of Griffe, as `mkdocs.yml` names it. `help()` shows docstrings as they are written; in
Markdown, lines below each other would be one paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

NAMES = r"\w+(?:, \w+)*"
ENTRY = re.compile(rf"({NAMES})  +(\S.*)")
NAMES_ALONE = re.compile(rf"({NAMES})")


class Lists(griffe.Extension):
    """Makes lists of columns, in the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Return a docstring with a list in place of each column of names and what they mean."""
    return "\n".join(_lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    listing = False
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        entry = ENTRY.fullmatch(line)
        alone = NAMES_ALONE.fullmatch(line) if following.startswith(" ") else None
        if entry or alone:
            if not listing:
                yield ""
            listing = True
            names = ", ".join(f"`{name}`" for name in (entry or alone or [""])[1].split(", "))
            yield f"- {names}: {entry[2] if entry else ''}".rstrip()
        elif listing and line.startswith(" "):
            yield f"    {line.strip()}"
        else:
            listing = listing and not line
            yield line

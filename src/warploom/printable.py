"""Text of others, such as names of records, keys of YAML and errors, as a terminal may have it."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    """Return `text` with escapes for what is no plain character: a terminal would act on it.

    Lines and tabs stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that some libraries add."""
    return _lines(error)[0]


def last_line(error: BaseException) -> str:
    """Why an actor or a task was lost, which Ray says last, below its own circumstances."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return lines or [type(error).__name__]

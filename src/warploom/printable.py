"""Text of others, such as names of records, keys of YAML and errors, as a terminal may have it."""

from __future__ import annotations

import re
import reprlib


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


class _Brief(reprlib.Repr):
    """Shows any value, however long or deep; no tensor's contents: that would wait for a GPU."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 200:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)

    def repr_instance(self, x: object, level: int) -> str:
        shape = getattr(x, "shape", None)
        if isinstance(shape, tuple) and hasattr(x, "data_ptr"):
            return f"<tensor {list(shape)}>"
        return super().repr_instance(x, level)


_BRIEF = _Brief()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother, _BRIEF.maxlong = 3, 80, 80, 80


def brief(value: object) -> str:
    """Return the repr of `value` in at most 120 characters, without reading all of a large one."""
    return cut(_BRIEF.repr(value), 120)


def cut(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`, with three dots where some were left out."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


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

"""Text of others' files, such as names of records and keys of YAML, as a terminal may have it."""

from __future__ import annotations


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

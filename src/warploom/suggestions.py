"""What a mistyped word may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


def suggestion(
    written: str, known: Iterable[str], also: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return `did you mean X?`, for the nearest of the `known` words; empty where none is near.

    Case is of no matter. `also` has other words, in lower case, for some of those known. The word
    that was written is never suggested.
    """
    words = {word.lower(): word for word in known if word != written}
    key = written.lower()
    near = [words[word] for word in (also or {}).get(key, ()) if word in words]
    if not near:
        exact = [key] if key in words else difflib.get_close_matches(key, words, n=1)
        near = [words[word] for word in exact]
    return f"did you mean {' or '.join(near)}?" if near else ""

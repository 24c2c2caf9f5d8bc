"""Regular expressions of others' configurations: bounded in length and in time.

They come with a checkpoint, from whoever made it. Python's re would run `(a+)+$` for hours.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

from warploom.errors import ProblemError
from warploom.printable import brief
from warploom.quantization.importers.layer import refused

LONGEST = 4096  # characters of a pattern
SECONDS = 1.0  # of this thread, for all patterns that one layer's name is held against
_FIX = "pass a quantization_config whose pattern is shorter or has no nested repeats"


def first_match(
    source: str, patterns: Iterable[str], name: str, how: Literal["match", "search"] = "match"
) -> str | None:
    """Return the first pattern that `name` begins with, or with "search" has, or None.

    Raises:
        ProblemError: a pattern is no regular expression, is too long, or takes too long.
    """
    if not name:
        return None
    left = SECONDS
    for pattern in patterns:
        run = getattr(_compiled(source, pattern), how)
        begin = time.thread_time()
        try:
            if left <= 0:
                raise TimeoutError
            if run(name, timeout=left) is not None:
                return pattern
            left -= time.thread_time() - begin
        except (TimeoutError, MemoryError) as error:
            raise refused(
                source,
                f"the pattern {brief(pattern)}",
                rule=f"patterns must be decided within {SECONDS:g} s for the name {brief(name)}",
                fix=_FIX,
            ) from error
    return None


@lru_cache(maxsize=1 << 14)
def _compiled(source: str, pattern: str) -> Any:  # noqa: ANN401 (regex.Pattern)
    import regex  # its matching can be timed out, and goes back over less

    if len(pattern) > LONGEST:
        raise _no_pattern(source, pattern, f"must have at most {LONGEST} characters")
    try:
        return regex.compile(pattern, regex.VERSION0)
    except (regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise _no_pattern(source, pattern, f"must be a regular expression: {why}") from error


def _no_pattern(source: str, pattern: str, rule: str) -> ProblemError:
    return refused(source, f"the pattern {brief(pattern)}", rule=rule, fix=_FIX)

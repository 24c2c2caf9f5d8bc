"""KeyboardInterrupt at a chosen line, as Ctrl-C raises it between two steps of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

Point = tuple[str, int, int]  # a line of a file, and how many times it ran


def lines(
    call: Callable[[], object], files: tuple[str, ...], stop: Point | None = None
) -> set[Point]:
    """The lines of files that a call runs, each once for each time; it is interrupted at `stop`."""
    times: dict[tuple[str, int], int] = {}

    def trace(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401
        name = frame.f_code.co_filename.rpartition("/integrations/")[2]
        if not name.startswith(files):
            return None
        if event == "line":
            line = name, frame.f_lineno
            times[line] = times.get(line, 0) + 1
            if (*line, times[line]) == stop:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return {(*line, time) for line, count in times.items() for time in (1, count)}

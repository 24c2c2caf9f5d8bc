"""Logging for people who have not set it up: what WARPLOOM_LOG or `-v` asks for, on standard error.

Every module logs to `logging.getLogger(__name__)`, below the logger `warploom`. A program that has
handlers of its own on the root logger gets the records there, once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from warploom.errors import ConfigurationError
from warploom.variables import choice

_FORMAT = "%(asctime)s %(name)s: %(message)s"


class _Handler(logging.Handler):
    """Writes to what standard error is at that time, unless the root logger has handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and sys.stderr is not None:
            print(self.format(record), file=sys.stderr, flush=True)


_handler = _Handler()
_handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))


def set_up() -> None:
    """Log from the level of WARPLOOM_LOG on to standard error."""
    logger = logging.getLogger("warploom")
    try:
        level = choice("WARPLOOM_LOG")
    except ConfigurationError as error:
        logger.warning("%s", error)  # a word of the log's is no reason not to start
        return
    if level != "warning":
        logger.setLevel(level.upper())
        logger.addHandler(_handler)


@contextmanager
def at(level: str) -> Iterator[None]:
    """Log from `level` on to standard error meanwhile; without one, as WARPLOOM_LOG says."""
    logger = logging.getLogger("warploom")
    before, handlers = logger.level, list(logger.handlers)
    if level:
        logger.setLevel(level.upper())
        logger.addHandler(_handler)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.handlers[:] = handlers

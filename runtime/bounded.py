"""Dictionaries of what was found out, with a bound: what lies longest in them goes first."""

from __future__ import annotations

from typing import TypeVar

from warploom.generator.locks import ForkLock

Key = TypeVar("Key")
Value = TypeVar("Value")

_lock = ForkLock()


def remember(known: dict[Key, Value], key: Key, value: Value, bound: int) -> None:
    """Keep `value` in a map of at most `bound` entries; the oldest go first."""
    with _lock:
        while len(known) >= bound:
            known.pop(next(iter(known)))
        known[key] = value

"""Public names and keywords that have new ones: the old ones stay, with a DeprecationWarning.

A function that has renamed keywords takes `**older: Unpack[...]` last, and begins with

    if older:
        return function(**current(function, older, locals()))

so that calls with today's keywords pay for one test of an empty dict.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from warploom.suggestions import suggestion


@dataclass(frozen=True)
class Keyword:
    """Today's keyword of an old one; `values` are those of the old one that have another value."""

    name: str
    values: Mapping[object, object] = field(default_factory=dict)

    def value_of(self, value: object) -> object:
        """Today's value of one of the old keyword."""
        return self.values[value] if isinstance(value, str) and value in self.values else value


# Public names of `warploom`, by their old ones.
NAMES = {"attention_append": "append_kv_cache", "attention_merge": "merge_state"}
# Keywords of public functions, by the functions' names of today.
KEYWORDS: Mapping[str, Mapping[str, Keyword]] = {
    "attention_decode": {
        "lengths": Keyword("cache_seqlens"),
        "starts": Keyword("cache_leftpad"),
    },
    "gemm": {
        "accumulation": Keyword("use_fast_accum", {"fast": True, "promoted": False}),
        "accumulate_into": Keyword("main_grad"),
    },
    "plan": {"accumulation": Keyword("use_fast_accum", {"fast": True, "promoted": False})},
}


def warn(old: str, new: str, level: int = 3) -> None:
    """Warn the caller of a public function that a name is now another; not while it is traced."""
    import torch  # which all that has old names loads

    if not torch.compiler.is_compiling():  # a graph without breaks has no warnings
        warnings.warn(f"{old} is now {new}: the old name will go", DeprecationWarning, level)


def current(
    function: Callable[..., object], older: Mapping[str, object], values: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments of a call with today's keywords in place of old ones.

    Args:
        function: The public function that was called.
        older: What it was called with beside its parameters.
        values: Its parameters by name, as `locals()` has them at its beginning.

    Returns:
        The arguments to call it with, by name.

    Raises:
        TypeError: A keyword is neither a parameter nor an old name of one, or the call has both
            the old and the new keyword.
    """
    name = function.__name__
    parameters = inspect.signature(function).parameters
    arguments = {key: values[key] for key in parameters if key in values}
    for rest in [key for key, one in parameters.items() if one.kind is one.VAR_KEYWORD]:
        arguments.pop(rest, None)
    for old, value in older.items():
        keyword = KEYWORDS[name].get(old)
        if keyword is None:
            near = suggestion(old, [*parameters])
            message = f"{name}() got an unexpected keyword argument {old!r}"
            raise TypeError(f"{message}: {near}" if near else message)
        if arguments[keyword.name] is not parameters[keyword.name].default:
            raise TypeError(
                f"{name}() got both {keyword.name} and {old}, its old name: pass {keyword.name}"
            )
        warn(f"{name}'s keyword {old}", keyword.name, level=4)
        arguments[keyword.name] = keyword.value_of(value)
    return arguments


def todays(function: Callable[..., object], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call of a public function by the names of today, with a warning."""
    name = function.__name__
    older, found = KEYWORDS.get(name, {}), dict[str, Any]()
    for given, value in keywords.items():
        keyword = older.get(given)
        if keyword is not None:
            warn(f"{name}'s keyword {given}", keyword.name, level=4)
            value = keyword.value_of(value)
        found[given if keyword is None else keyword.name] = value
    return found

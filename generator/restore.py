"""Frozen dataclasses from plain JSON values: the reverse of `dataclasses.asdict`.

Operations, schedules and shapes come back from records this way, without the YAML edge and without
pydantic, which no call may cost.
"""

# ruff: noqa: ANN401 (type hints and parsed JSON are values here)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from warploom.errors import SpecificationError
from warploom.generator.knob import stored_names
from warploom.generator.shapes import LARGEST

T = TypeVar("T")
Reader = Callable[[Any], Any]

_SHORT = Repr()  # of what is refused, which may be nested deep or megabytes long
_SHORT.maxstring = _SHORT.maxother = 100


def restore(kind: type[T], value: Any, place: str = "") -> T:
    """Return the `kind` that `value` was made of: a dataclass of a mapping, or a plain type.

    Fields that are missing take their defaults. Raises SpecificationError, with `place` in it, for
    a field that `kind` does not have, for a value that is not of its field's type, and for integers
    of more than 32 bits.
    """
    hint: Any = kind
    try:
        found: T = _reader(hint)(value)
    except _Refused as refused:
        written = ".".join((place or kind.__name__, *refused.fields))
        told = f"{written} {_SHORT.repr(refused.value)}"
        raise SpecificationError(told, rule=refused.rule) from refused.__cause__
    return found


class _Refused(Exception):
    """A value that is refused; `fields` lead to it, as far as it has been passed up."""

    def __init__(self, value: Any, rule: str) -> None:
        self.value, self.rule = value, rule
        self.fields: tuple[str, ...] = ()


@cache
def _reader(hint: Any) -> Reader:
    """What makes a value of a type: thousands of values are of few types."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _of_dataclass(hint)
    if origin is tuple:
        return _of_tuple(arguments)
    if NoneType in arguments:
        inner = _reader(arguments[0])
        return lambda value: None if value is None else inner(value)
    if origin in (Union, UnionType):
        return lambda value: _reader(_named(arguments, value))(value)
    if origin is Literal:
        return _of_literal(arguments)
    return _of_plain(hint)


def _of_tuple(hints: tuple[Any, ...]) -> Reader:
    readers = [_reader(hint) for hint in hints if hint is not ...]

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _Refused(value, "must be a list")
        if hints[-1] is ...:
            return tuple(map(readers[0], value))
        if len(readers) != len(value):
            raise _Refused(value, f"must have {len(readers)} items")
        return tuple(one(part) for one, part in zip(readers, value, strict=True))

    return read


def _of_literal(words: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        for word in words:
            if value == word and type(value) is type(word):
                return value
        raise _Refused(value, f"must be one of {', '.join(map(str, words))}")

    return read


def _of_plain(hint: Any) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is int and abs(value) > LARGEST:  # no field means more
            raise _Refused(value, "must be an integer of 32 bits")
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        raise _Refused(value, f"must be of type {hint.__name__}")

    return read


def _of_dataclass(kind: Any) -> Reader:
    hints, stored = _hints(kind), stored_names(kind)
    # By the keys that values may have: the names of fields, and stored ones.
    readers = {
        key: (name, _reader(hint)) for name, hint in hints.items() for key in (name, stored[name])
    }

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Refused(value, "must be a mapping of fields")
        if unknown := sorted(value.keys() - readers.keys()):
            raise _Refused(unknown[0], f"must be one of the fields {', '.join(hints)}")
        given: dict[str, Any] = {}
        try:
            for key, content in value.items():
                name, reader = readers[key]
                if name in given:
                    other = next(earlier for earlier in value if readers[earlier][0] == name)
                    raise _Refused(key, f"is the same field as {other}: give one of them")
                given[name] = reader(content)
        except _Refused as refused:
            refused.fields = (key, *refused.fields)
            raise
        try:
            return kind(**given)
        except TypeError as error:  # a field without a default is missing
            raise _Refused(value, str(error).partition(") ")[2] or str(error)) from error

    return read


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _named(kinds: tuple[Any, ...], value: Any) -> Any:
    """The dataclass of a union whose `step` is that of `value`."""
    step = value.get("step") if isinstance(value, dict) else None
    for kind in kinds:
        if step in get_args(_hints(kind)["step"]):
            return kind
    raise _Refused(value, "must name an existing step")

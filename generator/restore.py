"""Frozen dataclasses from plain JSON values: the reverse of `dataclasses.asdict`.

Operations, schedules and shapes come back from records this way, without the YAML edge and without
pydantic, which no call may cost.
"""

# ruff: noqa: ANN401 (type hints and parsed JSON are values here)

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from warploom.errors import SpecificationError
from warploom.generator.knob import stored_names
from warploom.generator.shapes import LARGEST

T = TypeVar("T")

_SHORT = Repr()  # of what is refused, which may be nested deep or megabytes long
_SHORT.maxstring = _SHORT.maxother = 100


def restore(kind: type[T], value: Any, place: str = "") -> T:
    """Return the `kind` that `value` was made of: a dataclass of a mapping, or a plain type.

    Fields that are missing take their defaults. Raises SpecificationError, with `place` in it, for
    a field that `kind` does not have, for a value that is not of its field's type, and for integers
    of more than 32 bits.
    """
    found: T = _restored(kind, value, place or kind.__name__)
    return found


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


@cache
def _names(kind: type) -> dict[str, str]:
    """The fields of a dataclass by the keys that values may have: their names, and stored ones."""
    stored = stored_names(kind)
    return {key: name for name in _hints(kind) for key in (name, stored[name])}


@cache
def _parts(hint: Any) -> tuple[bool, Any, tuple[Any, ...]]:
    """Whether a type is a dataclass, what it is of others, and of which: thousands ask again."""
    return is_dataclass(hint), get_origin(hint), get_args(hint)


def _restored(hint: Any, value: Any, place: str) -> Any:
    known, origin, arguments = _parts(hint)
    if known:
        return _dataclass(hint, value, place)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _refusal(place, value, "must be a list")
        inner = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(inner) != len(value):
            raise _refusal(place, value, f"must have {len(inner)} items")
        return tuple(_restored(h, v, place) for h, v in zip(inner, value, strict=True))
    if NoneType in arguments:
        return None if value is None else _restored(arguments[0], value, place)
    if origin in (Union, UnionType):
        return _dataclass(_named(arguments, value, place), value, place)
    if origin is Literal:
        if not any(value == one and type(value) is type(one) for one in arguments):
            raise _refusal(place, value, f"must be one of {', '.join(map(str, arguments))}")
        return value
    if type(value) is int and abs(value) > LARGEST:  # no field means more
        raise _refusal(place, value, "must be an integer of 32 bits")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise _refusal(place, value, f"must be of type {hint.__name__}")
    return value


def _dataclass(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise _refusal(place, value, "must be a mapping of fields")
    hints, names = _hints(kind), _names(kind)
    if unknown := sorted(value.keys() - names.keys()):
        raise _refusal(place, unknown[0], f"must be one of the fields {', '.join(hints)}")
    given: dict[str, Any] = {}
    for key, content in value.items():
        if names[key] in given:
            other = next(earlier for earlier in value if names[earlier] == names[key])
            rule = f"is the same field as {other}: give one of them"
            raise _refusal(f"{place}.{key}", key, rule)
        given[names[key]] = _restored(hints[names[key]], content, f"{place}.{key}")
    try:
        return kind(**given)
    except TypeError as error:  # a field without a default is missing
        raise _refusal(place, value, str(error).partition(") ")[2] or str(error)) from error


def _named(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    """The dataclass of a union whose `step` is that of `value`."""
    step = value.get("step") if isinstance(value, dict) else None
    for kind in kinds:
        if step in get_args(_hints(kind)["step"]):
            return kind
    raise _refusal(place, value, "must name an existing step")


def _refusal(place: str, value: Any, rule: str) -> SpecificationError:
    return SpecificationError(f"{place} {_SHORT.repr(value)}", rule=rule)

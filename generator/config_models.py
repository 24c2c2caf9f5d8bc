"""Pydantic models of a configuration file, built from the families' frozen dataclasses.

A field is listed once, in its dataclass. An operation has its fields as they are; a schedule's take
one value or a list of them, and some take `auto`. Strict: no conversions and no unknown fields.
"""

# ruff: noqa: ANN401 (type hints and parsed JSON are values here)

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
)
from pydantic_core import PydanticCustomError

from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.families import every
from warploom.generator.families.base import Family
from warploom.generator.knob import Knob, knobs, types

TAGS = ("family", "step")  # the fields that say which dataclass is meant: always written


class Model(BaseModel):
    """A mapping in the file, which becomes a `target`; a plain dictionary where there is none."""

    model_config = ConfigDict(strict=True, extra="forbid")
    target: ClassVar[type | None] = None


@cache
def file_model() -> type[Model]:
    """Return the model of a whole file."""
    entries = (Annotated[_entry_model(family), Tag(family.name)] for family in every())
    arch: Any = Literal.__getitem__(tuple(ARCHITECTURES))
    return create_model(
        "Configuration",
        __base__=Model,
        __doc__="The kernels to generate for one architecture.",
        version=(_edge(Literal[1]), ...),
        arch=(arch, ...),
        kernels=(_some(_one_of(entries, family_of)), ...),
    )


def family_of(entry: Any) -> str:
    """Return the family that an entry's first operation names; where it names none, the likeliest.

    That is the one whose operations have the most of its fields.
    """
    try:
        operation = dict(entry["operations"][0])
    except (LookupError, TypeError, ValueError):
        operation = {}
    named = operation.get("family")
    if isinstance(named, str):
        return named
    shared = {
        known.name: sum(one.name in operation for one in fields(known.operation))
        for known in every()
    }
    return max(shared, key=shared.__getitem__)


def built(value: Any) -> Any:
    """Turn validated models, however nested, into what they stand for."""
    if isinstance(value, Model):
        content = {name: built(getattr(value, name)) for name in type(value).model_fields}
        return value.target(**content) if value.target else content
    return type(value)(map(built, value)) if isinstance(value, list | tuple) else value


def summary(source: type) -> str:
    """Return the docstring of a dataclass, on one line."""
    return " ".join((inspect.getdoc(source) or "").split())


def _entry_model(family: Family) -> type[Model]:
    return create_model(
        f"{family.operation.__name__.removesuffix('Operation')}Kernels",
        __base__=Model,
        __doc__="Kernels: each operation with each combination of the schedules' values.",
        operations=(_some(_operation_model(family.operation)), ...),
        schedules=(_some(_schedule_model(family.schedule)), ...),
    )


def _operation_model(source: type) -> type[Model]:
    """Return the model of an operation, or of a step in one: the fields of the dataclass."""
    definitions = {
        field.name: (_ranged(source, field.name), ... if field.name in TAGS else _default(field))
        for field in fields(source)
    }
    model = _model(source, definitions)
    model.target = source
    return model


def _schedule_model(source: type) -> type[Model]:
    """Return the model of a space of schedules: each field of the dataclass, or a list of it."""
    definitions = {
        field.name: (_one_or_many(_ranged(source, field.name) | Literal["auto"]), "auto")
        if knobs(source)[field.name].auto
        else (_one_or_many(_ranged(source, field.name)), _default(field))
        for field in fields(source)
    }
    return _model(source, definitions)


def _model(source: type, definitions: dict[str, tuple[Any, Any]]) -> type[Model]:
    """Return the model of a dataclass, with what is said of its fields, for editors to show."""
    described: dict[str, Any] = {
        name: (Annotated[hint, _field(name, knobs(source)[name])], default)
        for name, (hint, default) in definitions.items()
    }
    return create_model(source.__name__, __base__=Model, __doc__=summary(source), **described)


def _field(name: str, said: Knob) -> Any:
    """Return what pydantic is told of a field: its meaning, and the older key that it may have."""
    keys = AliasChoices(name, said.stored_as) if said.stored_as else None
    return Field(description=said.doc or None, validation_alias=keys)


def _ranged(source: type, name: str) -> Any:
    """Return the type of a field in the file, with its range: for editors, the rules refuse."""
    said, hint = knobs(source)[name], _edge(types(source)[name])
    bounds = {"minimum": said.least, "maximum": said.most}
    told: Any = {key: bound for key, bound in bounds.items() if bound is not None}
    return Annotated[hint, Field(json_schema_extra=told)] if told else hint


def _default(field: Any) -> Any:
    return ... if field.default is MISSING else field.default


def _edge(hint: Any) -> Any:
    """Return the type that a dataclass's field of type `hint` has in the file."""
    arguments = get_args(hint)
    if get_origin(hint) is tuple and arguments[-1] is ...:
        return GenericAlias(tuple, (_edge(arguments[0]), ...))
    if arguments and all(map(is_dataclass, arguments)):
        return _one_of(map(_operation_model, arguments), "step")
    if get_origin(hint) is Literal and all(isinstance(value, int) for value in arguments):
        return Annotated[hint, BeforeValidator(_no_truth_value)]
    return hint


def _no_truth_value(value: Any) -> Any:
    """Keep `true` from passing for a literal 1, which it is equal to."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be an integer")
    return value


def _one_or_many(hint: Any) -> Any:
    """Return the type of one `hint` or a list of them; one tuple is itself a list in the file."""
    nested = get_origin(hint) is tuple

    def shape(value: object) -> str:
        many = isinstance(value, list) and (
            not nested or any(isinstance(item, list) for item in value)
        )
        return "many" if many else "one"

    return _one_of((Annotated[hint, Tag("one")], Annotated[_some(hint), Tag("many")]), shape)


def _one_of(hints: Iterable[Any], discriminator: str | Callable[[Any], str]) -> Any:
    return Annotated[reduce(or_, hints), Discriminator(discriminator)]


def _some(hint: Any) -> Any:
    return Annotated[list[hint], Field(min_length=1)]

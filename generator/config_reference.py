"""The reference of configurations in Markdown: every field of the families' dataclasses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from warploom.generator.config_models import TAGS, summary
from warploom.generator.families import every
from warploom.generator.families.base import Family
from warploom.generator.knob import Knob, knobs, types
from warploom.generator.markdown import insert, table

_COLUMNS = ("field", "values", "default", "meaning")


def reference() -> str:
    """Return the tables of every family: its operation, the steps of an epilogue, its schedule."""
    return "\n\n".join(map(_family, every()))


def renewed(page: str) -> str:
    """Return a page with the tables of each family whose markers it has; ValueError if it has none.

    The markers of a family are `<!-- fields of NAME: begin -->` and `<!-- fields of NAME: end -->`.
    """
    told = [family for family in every() if f"<!-- fields of {family.name}: begin -->" in page]
    if not told:
        raise ValueError("the text has no <!-- fields of FAMILY: begin -->")
    for family in told:
        page = insert(page, f"fields of {family.name}", _family(family))
    return page


def _family(family: Family) -> str:
    return "\n\n".join(_parts(family))


def _parts(family: Family) -> Iterable[str]:
    yield f"**An operation of `{family.name}`.** {summary(family.operation)}"
    yield table(_COLUMNS, map(_row, _described(family.operation)))
    steps = [step for kind in types(family.operation).values() for step in _steps(kind)]
    if steps:
        yield "**A step of its epilogue.**"
        yield table(("step", "fields", "meaning"), map(_step, steps))
    yield f"**A schedule of `{family.name}`**, each field one value or a list of them."
    yield table(_COLUMNS, map(_row, _described(family.schedule)))


def _steps(hint: Any) -> Sequence[type]:  # noqa: ANN401 (type hints are values here)
    """The dataclasses of a field that is a tuple of any of them."""
    kinds = get_args(get_args(hint)[0]) if get_origin(hint) is tuple else ()
    return kinds if kinds and all(map(is_dataclass, kinds)) else ()


Described = tuple[Field[Any], Any, Knob]  # a field, its type, what is said of it


def _described(source: type) -> list[Described]:
    hints, said = types(source), knobs(source)
    found = [(field, hints[field.name], said[field.name]) for field in fields(source)]
    return sorted(found, key=lambda described: described[0].name not in TAGS)


def _row(described: Described) -> tuple[str, ...]:
    field, hint, said = described
    values, default = _values(hint), _default(field)
    if said.span:
        values += f" {said.span}"
    if said.auto:
        values, default = f"{values}, or `auto`", "`auto`"
    return f"`{field.name}`", values, default, said.doc


def _step(source: type) -> tuple[str, ...]:
    (tag, *own) = _described(source)
    (name,) = get_args(tag[1])
    told = [f"`{field.name}`: {_values(hint)}" for field, hint, _ in own]
    more = [f"`{field.name}`: {said.doc}." for field, _, said in own]
    return f"`{name}`", "; ".join(told) or "none", " ".join((summary(source), *more))


def _values(hint: Any) -> str:  # noqa: ANN401 (type hints are values here)
    """What a field of this type takes, as it is written in YAML."""
    arguments = get_args(hint)
    if hint is bool:
        arguments = (False, True)
    elif get_origin(hint) is tuple:
        several = arguments[-1] is ...
        return "a list of steps" if several else f"a list of {len(arguments)} integers"
    elif get_origin(hint) is not Literal:
        return "an integer"
    return ", ".join(f"`{_yaml(value)}`" for value in arguments)


def _default(field: Field[Any]) -> str:
    required = field.name in TAGS or field.default is MISSING
    return "required" if required else f"`{_yaml(field.default)}`"


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)

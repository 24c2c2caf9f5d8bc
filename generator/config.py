"""The edge between YAML and the generator: a file becomes operations and spaces of schedules.

`document.py` reads the file, `config_models.py` says what may be in it. Whatever a file gets wrong
is one ConfigurationError, with a line `file:line: field: value: rule: fix` for each problem.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from warploom.generator import document
from warploom.generator.architectures import served
from warploom.generator.config_models import built, family_of, file_model
from warploom.generator.document import Document, Place
from warploom.generator.elements import ELEMENTS
from warploom.generator.epilogue import STEPS
from warploom.generator.families import every, family, names
from warploom.generator.families.base import Family
from warploom.generator.knob import stored_names
from warploom.generator.specification import Operation
from warploom.suggestions import suggestion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """A value, and where it is written: `file:line: field`."""

    value: T
    place: str


@dataclass(frozen=True, slots=True)
class Space:
    """One entry of `kernels`: every operation with every point of every schedule's product.

    A schedule maps each field, in the order of the dataclass, to its values.
    """

    family: Family
    operations: tuple[Placed[Operation], ...]
    schedules: tuple[Mapping[str, tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What one file says; nothing in it has been held against the families' rules yet."""

    arch: str
    spaces: Placed[tuple[Space, ...]]


def load(path: Path) -> Configuration:
    """Read the configuration at `path`, or raise one ConfigurationError with all its problems."""
    read = document.read(path)
    model = None
    try:
        model = file_model().model_validate_json(json.dumps(read.value))
    except ValidationError as error:
        _report(read, error)
    read.check()
    file = built(model)
    spaces = tuple(_space(read, index, entry) for index, entry in enumerate(file["kernels"]))
    return Configuration(file["arch"], Placed(spaces, read.where(("kernels",))))


def schema() -> str:
    """Return the JSON schema of a configuration, for editors."""
    described = file_model().model_json_schema(schema_generator=_Schema)
    return json.dumps({"$schema": _Schema.schema_dialect, **described}, indent=2) + "\n"


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:
        return False  # a title would only repeat the field's name


def _space(read: Document, index: int, entry: dict[str, Any]) -> Space:
    place: Place = ("kernels", index, "operations")
    operations = tuple(
        Placed(operation, read.where((*place, number)))
        for number, operation in enumerate(entry["operations"])
    )
    schedules = tuple(
        {
            field: tuple(value) if isinstance(value, list) else (value,)
            for field, value in schedule.items()
        }
        for schedule in entry["schedules"]
    )
    return Space(family(operations[0].value.family), operations, schedules)


# ---- Problems ------------------------------------------------------------------------------------

_LIST, _MAPPING = "should be a list", "should be a mapping"
_RULES = {  # pydantic speaks of JSON
    "missing": "is required",
    "union_tag_not_found": "is required",
    "extra_forbidden": "is no field of this",
    "int_type": "should be an integer",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
}
_TAG_PLACES: dict[str, Place] = {  # discriminators, as pydantic names them
    "'step'": ("step",),
    f"{family_of.__name__}()": ("operations", 0, "family"),
}
_ALSO = {  # what others call it
    **{element.torch: (element.name,) for element in ELEMENTS.values()},
    "half": ("fp16",),
    "float": ("fp32",),
    "fp8": ("e4m3", "e5m2"),
    "swish": ("silu",),
}
_HELP = "`warploom schema` has every field and what it takes"


def _report(read: Document, error: ValidationError) -> None:
    """Note every problem that pydantic found; those of a union, at one place, are one problem."""
    found: dict[Place, tuple[str, list[str], list[str]]] = {}
    elsewhere = dict(_of_another_family(read.value))
    for place, (value, rule, fix) in elsewhere.items():
        found[place] = value, [rule], [fix]
    for detail in error.errors(include_url=False):
        place = _place(read, detail["loc"])
        if not any(place[: len(other)] == other for other in elsewhere):
            place, value, rule, fix = _problem(read, place, detail)
            _, rules, fixes = found.setdefault(place, (value, [], []))
            rules.append(rule)
            fixes.append(fix)
    for place, (value, rules, fixes) in found.items():
        rule = " or ".join(dict.fromkeys(rules)).replace(" or should be ", " or ")
        read.report(place, value, rule, next((fix for fix in fixes if fix != _HELP), _HELP))


def _problem(
    read: Document, place: Place, detail: Mapping[str, Any]
) -> tuple[Place, str, str, str]:
    """Return place, value, rule and fix of one of pydantic's errors, found at `place`."""
    kind, location, context = detail["type"], detail["loc"], detail.get("ctx", {})
    message = detail["msg"].replace(" after validation", "")
    rule = _RULES.get(kind) or re.sub(r"^\w+ (should)", r"\1", message)
    value = json.dumps(detail["input"])
    if kind == "missing" and isinstance(location[-1], int):
        return place, value, "should have more items", _HELP
    if kind == "missing":
        return (*place, location[-1]), "missing", rule, "add it"
    if kind == "extra_forbidden":
        close = suggestion(str(location[-1]), _fields_at(read, place[:-1]))
        return place, value, rule, close or f"remove it; {_HELP}"
    if kind == "union_tag_not_found":
        return (*place, *_TAG_PLACES[context["discriminator"]]), "missing", rule, "add it"
    if kind == "union_tag_invalid":
        place = (*place, *_TAG_PLACES[context["discriminator"]])
        value, rule = json.dumps(context["tag"]), f"should be one of {context['expected_tags']}"
    words = re.findall(r"'(\w+)'", rule)
    written = value.strip('"')
    if place == ("arch",) and not any(word.startswith(written) for word in words):
        return place, value, rule, f"kernels exist for {served()} only"
    return place, value, rule, suggestion(written, words, _ALSO) or _HELP


def _of_another_family(value: Any) -> Iterator[tuple[Place, tuple[str, str, str]]]:  # noqa: ANN401
    """Operations, and schedules by their fields, that are of another family than their entry."""
    for index, entry in enumerate(_items(value, "kernels")):
        known = family_of(entry)
        if known not in names():
            continue
        for number, operation in enumerate(_items(entry, "operations")):
            named = operation.get("family") if isinstance(operation, dict) else None
            if named != known and named in names():
                rule = f"must be of {known}, as the entry's first one is"
                place = ("kernels", index, "operations", number)
                yield place, (f"an operation of {named}", rule, _own_entry(named))
        own = _keys(family(known).schedule)
        for number, schedule in enumerate(_items(entry, "schedules")):
            fields = set(schedule) if isinstance(schedule, dict) else set()
            others = (one.name for one in every() if fields <= _keys(one.schedule))
            if not fields <= own and (named := next(others, "")):
                rule = f"must be of {known}, as the entry's operations are"
                place = ("kernels", index, "schedules", number)
                yield place, (f"a schedule of {named}", rule, _own_entry(named))


def _own_entry(named: str) -> str:
    return f"an entry has one family: give {named} an entry of its own"


def _items(mapping: Any, name: str) -> list[Any]:  # noqa: ANN401 (what a file holds)
    found = mapping.get(name) if isinstance(mapping, dict) else None
    return found if isinstance(found, list) else []


def _names(source: type) -> set[str]:
    return {field.name for field in dataclasses.fields(source)}


def _keys(source: type) -> set[str]:
    """The names of a dataclass's fields, and the older ones that a file may have."""
    return _names(source) | set(stored_names(source).values())


def _fields_at(read: Document, place: Place) -> set[str]:
    """The fields of the mapping at `place`."""
    if not place:
        return set(file_model().model_fields)
    entry = _items(read.value, "kernels")[int(place[1])]
    if len(place) == 2:
        return {"operations", "schedules"}
    known = family(family_of(entry))
    if place[2] == "schedules":
        return _names(known.schedule)
    if len(place) == 4:
        return _names(known.operation)
    step = entry["operations"][place[3]]["epilogue"][place[5]].get("step")
    return {name for one in STEPS if one.step == step for name in _names(type(one))}


def _place(read: Document, location: tuple[str | int, ...]) -> Place:
    """Return the place in the file: a location without the branches that pydantic took."""
    place: Place = ()
    for part in location:
        if (*place, part) in read.lines:
            place = (*place, part)
    return place

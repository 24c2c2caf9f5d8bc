"""A field of an operation, a schedule or an epilogue's step, and everything that is said of it.

A field is declared once, by `knob`: what is written in YAML and its reference, what rules hold it
against, how a kernel's name shows it and how a search moves it are read from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import product
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

T = TypeVar("T")

ANY = "any"  # of `follows`: every other field
_KNOB = "knob"  # in the metadata of a field


@dataclass(frozen=True, slots=True)
class Knob:
    """What is said of a field; of one that is no knob, nothing."""

    doc: str = ""
    name: str | None = None
    after: str | None = None
    least: int | None = None
    most: int | None = None
    auto: bool = False
    detail: bool = False
    follows: str | None = None
    later: bool = False
    stored_as: str | None = None

    def nearest(self, value: int) -> int:
        """Return the integer that it takes which is nearest to `value`."""
        at_least = value if self.least is None else max(self.least, value)
        return at_least if self.most is None else min(self.most, at_least)

    @property
    def span(self) -> str:
        """The integers that it takes, in words; empty where that is all."""
        if self.most is None:
            return "" if self.least is None else f"{self.least} or more"
        return f"at most {self.most}" if self.least is None else f"{self.least} to {self.most}"


def knob(
    *,
    default: Any = MISSING,  # noqa: ANN401 (as dataclasses.field)
    doc: str,
    name: str | None = None,
    after: str | None = None,
    least: int | None = None,
    most: int | None = None,
    auto: bool = False,
    detail: bool = False,
    follows: str | None = None,
    later: bool = False,
    stored_as: str | None = None,
) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare a field of a `frozen` class.

    default      what it is where nothing is given; such fields need not be written
    doc          its meaning, for the reference, editors and readers of the class
    name         its token in a kernel's name, see names.py
    after        the field that it comes after in a name; "" where it comes first: names of version
                 0.1.0 had another order than fields
    least, most  the integers that it takes
    auto         YAML may say `auto`, and does where it says nothing: the family's rules complete it
    detail       worth some percent: the model's first choices do not differ in it alone
    follows      the field that it may move with in a search's step, or ANY
    later        it joins a class whose kernels have names already: at its default, which is frozen
                 with this, it is no part of the identity, and digests, names, store keys and
                 records stay what they were. A truth value is false there, as names without the
                 word say. It is given by name, since positions stay what they were, too
    stored_as    an older name of the field, which digests, records and kernels' names keep, and
                 which YAML still takes
    """
    if later and (default is MISSING or default is True):
        raise TypeError(f"default {default!r} of a later field: must be what older names mean")
    said = Knob(doc, name, after, least, most, auto, detail, follows, later, stored_as)
    return field(default=default, kw_only=later, metadata={_KNOB: said})


@dataclass_transform(frozen_default=True, field_specifiers=(knob,))
def frozen(kind: type[T]) -> type[T]:
    """Make a frozen dataclass with slots of a class whose fields are knobs."""
    return dataclass(frozen=True, slots=True)(kind)


def knobs(kind: type) -> Mapping[str, Knob]:
    """Return what is said of each field of a dataclass, in order."""
    return _declared(kind)[0]


def stored_names(kind: type) -> Mapping[str, str]:
    """Return the name that each field of a dataclass has in what is stored, in order."""
    return {name: said.stored_as or name for name, said in knobs(kind).items()}


def types(kind: type) -> Mapping[str, Any]:
    """Return the type of each field of a dataclass, in order."""
    return _declared(kind)[1]


def every(kind: type[T]) -> Iterator[T]:
    """Every value of a dataclass whose fields are choices, in the order of these."""
    choices = {name: get_args(hint) for name, hint in types(kind).items()}
    for values in product(*choices.values()):
        yield kind(**dict(zip(choices, values, strict=True)))


@cache
def _declared(kind: type) -> tuple[dict[str, Knob], dict[str, Any]]:
    hints, found = get_type_hints(kind), fields(kind)
    said = {one.name: one.metadata.get(_KNOB, Knob()) for one in found}
    return said, {one.name: hints[one.name] for one in found}

"""Kernels' names: printed from the fields of a spec, and read back.

A name is family_arch_, the tokens of what is not at its default, and 8 digits of the digest. A
token is what a field's knob has as its `name`: `{}` stands for the value, or for each item of a
tuple. More of them take the fields that follow, whose own `name` is empty; of `{}|{}_{}` the first
form stands where all values are equal. Without a `name` it is the value, or of a truth value the
field's name. Fields without a default are always shown, and truth values where they are true.

A name is read with the tokens of defaults, too, which version 0.1.0 showed, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import repeat
from typing import Any, Literal, get_args, get_origin

from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.knob import every, knobs, stored_names, types

_NUMBER = "[0-9]{1,9}"  # a pattern that no text of thousands of digits fits
_FILE = 255  # characters, at most, of the name of a file
_ENDING = 9  # characters of a kernel's name, `_` and 8 digits, that no other kernel's ends with


def file(name: str, suffix: str) -> str:
    """Return what a file of a kernel is called: its name, cut before the digits where it is long.

    A suffix has no dot. Names that are too long are of epilogues of many steps.
    """
    most = _FILE - len(f".{suffix}")
    fits = name if len(name) <= most else name[: most - _ENDING] + name[-_ENDING:]
    return f"{fits}.{suffix}"


def short(record: object) -> str:
    """Return what a name shows of an operation or a schedule."""
    kind: type = type(record)
    texts = []
    for token in _tokens(kind):
        values = [*map(getattr, repeat(record), token.hints)]
        usual = token.parts and values == [*token.defaults.values()]  # no word stands for one
        texts += [] if usual else [token.text(values)]
    return _joined(texts)


def full(record: object) -> str:
    """Return an operation or a schedule with its defaults, for people.

    Defaults of fields that joined later are left out: most users have never met these.
    """
    kind: type = type(record)
    texts = []
    for token in _tokens(kind):
        values = [getattr(record, name) for name in token.hints]
        if not (token.is_later and values == [*token.defaults.values()]):
            texts.append(token.text(values, whole=True))
    return _joined(texts)


def read(name: str, family: str, operation: type, schedule: type) -> tuple[str, Any, Any] | None:
    """Return the architecture, operation and schedule that a name shows; None if not the family's.

    They need not be legal, and the digest at the end need not be theirs.
    """
    match = _pattern(family, operation, schedule).fullmatch(name)
    if match is None:
        return None
    arch = next(row.name for row in ARCHITECTURES.values() if row.token == match["arch"])
    one, other = (
        kind(**{k: v for token in _tokens(kind) for k, v in token.read(match[token.group]).items()})
        for kind in (operation, schedule)
    )
    return arch, one, other


@dataclass(frozen=True, slots=True)
class _Part:
    """What one `{}` of a token stands for: a pattern, and the value of text that fits it."""

    pattern: str
    value: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class _Token:
    """One token of the names of a class.

    group      its group in a pattern of whole names
    hints      the types of the fields that it shows
    defaults   of those fields that have one
    forms      the whole one, and a short one where there is one
    parts      of the whole form
    is_later   its fields joined a class whose kernels had names already
    """

    group: str
    hints: dict[str, Any]
    defaults: dict[str, Any]
    forms: tuple[str, ...]
    parts: tuple[_Part, ...]
    is_later: bool

    @property
    def patterns(self) -> list[str]:
        """Of each form, with a group for each part."""
        return [form.format(*(f"({part.pattern})" for part in self.parts)) for form in self.forms]

    def text(self, values: list[object], *, whole: bool = False) -> str:
        """What stands in the name; nothing for a boolean that is false, and for no steps."""
        if values in ([False], [()]):
            return ""
        texts: list[str] = []
        for value in values:
            if not isinstance(value, tuple):
                texts.append(str(value))
            elif isinstance(value[0], int):
                texts += map(str, value)
            else:
                texts.append(_joined(step.token for step in value))
        return self.forms[0 if whole or len(set(texts)) > 1 else -1].format(*texts)

    def read(self, written: str | None) -> dict[str, object]:
        """The fields of what is written; where nothing is, of none but a truth value."""
        if not self.parts:
            return dict.fromkeys(self.hints, written is not None)
        if written is None:
            return {}
        matches = (re.fullmatch(pattern, written) for pattern in self.patterns)
        texts = next(match.groups() for match in matches if match)
        values = (part.value(texts[i % len(texts)]) for i, part in enumerate(self.parts))
        return {
            name: tuple(next(values) for _ in get_args(hint)) if _is_tuple(hint) else next(values)
            for name, hint in self.hints.items()
        }


@cache
def _pattern(family: str, operation: type, schedule: type) -> re.Pattern[str]:
    pattern = rf"{family}_(?P<arch>{_either(row.token for row in ARCHITECTURES.values())})"
    for token in (*_tokens(operation), *_tokens(schedule)):
        forms = "|".join(re.sub(r"\((?!\?)", "(?:", form) for form in token.patterns)
        pattern += f"(?:_(?P<{token.group}>{forms}))" + "?" * bool(token.defaults)
    return re.compile(pattern + "_[0-9a-f]{8}")


@cache
def _tokens(kind: type) -> tuple[_Token, ...]:
    """The tokens of a class, in the order of names."""
    said, hints = knobs(kind), types(kind)
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    groups: list[list[str]] = []
    for name in _ordered(kind):
        if said[name].name == "":
            groups[-1].append(name)
        elif len(get_args(hints[name])) != 1:  # a choice of one, such as the family, says nothing
            groups.append([name])
    return tuple(
        _Token(
            f"{kind.__name__}_{names[0]}",
            {name: hints[name] for name in names},
            {name: defaults[name] for name in names if name in defaults},
            _forms(stored_names(kind)[names[0]], hints[names[0]], said[names[0]].name),
            tuple(part for name in names for part in _parts(hints[name])),
            all(said[name].later for name in names),
        )
        for names in groups
    )


def _ordered(kind: type) -> list[str]:
    order = list(knobs(kind))
    for name, said in knobs(kind).items():
        if said.after is not None:
            order.remove(name)
            order.insert(order.index(said.after) + 1 if said.after else 0, name)
    return order


def _forms(field: str, hint: object, name: str | None) -> tuple[str, ...]:
    usual = field if hint is bool else "{}"
    return tuple(reversed((usual if name is None else name).split("|")))


def _parts(hint: object) -> Iterator[_Part]:
    arguments = get_args(hint)
    if _is_tuple(hint):
        yield from (part for item in arguments for part in _parts(item))
    elif ... in arguments:
        steps = _steps(get_args(arguments[0]))
        one = _either(steps)
        yield _Part(f"{one}(?:_{one})*", lambda t: tuple(steps[s] for s in re.findall(one, t)))
    elif hint is int or (get_origin(hint) is Literal and isinstance(arguments[0], int)):
        yield _Part(_NUMBER, int)
    elif get_origin(hint) is Literal:
        yield _Part(_either(arguments), str)


def _steps(kinds: Iterable[type[Any]]) -> dict[str, Any]:
    """Every step of some classes, by its token."""
    return {step.token: step for kind in kinds for step in every(kind)}


def _is_tuple(hint: object) -> bool:
    """A tuple of so many items, not of any number."""
    return get_origin(hint) is tuple and ... not in get_args(hint)


def _joined(texts: Iterable[str]) -> str:
    return "_".join(filter(None, texts))


def _either(words: Iterable[str]) -> str:
    """A pattern of any of the words, the longest first where one begins another."""
    return f"(?:{'|'.join(sorted(words, key=len, reverse=True))})"

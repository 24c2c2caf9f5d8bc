"""Which functions of an emitted kernel nothing calls, by the words of its text.

A call is known by its function's name, and by whether it is one of a member or of none: where two
structs have a function of one name, either's call counts for both. So what is found is never
called; what is not found may still be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

_REMARKS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_STRUCT = re.compile(r"\b(?:struct|union)\s+(?:alignas\([^{};]*\)\s*)?(\w+)[^;{}()]*\{")
_FUNCTION = re.compile(r"__device__[^;{}()]*?(\w+|operator\W+?)\(")
_CALL = re.compile(r"(\.|->|::)?\s*(?:template )?\b(\w+)(?=\(|<[^;(){}]*>\()")
_UP_TO_BODY = re.compile(r"[^{;(]*")
_BEFORE_BODY = (")", "}", "const", "noexcept")

Called = tuple[bool, str]  # whether it is a member, and its name
Struct = tuple[str, int, int]  # its name, and from where to where it is


@dataclass(frozen=True)
class Function:
    """One that a text defines."""

    struct: str  # of which it is a member, or ""
    name: str
    start: int
    end: int
    body: str  # and its parameters, and what a constructor begins with

    @property
    def title(self) -> str:
        """How it is told apart."""
        return f"{self.struct}::{self.name}" if self.struct else self.name

    @property
    def called(self) -> Called:
        """What a call of it is known by."""
        return bool(self.struct), self.name

    @property
    def named_otherwise(self) -> bool:
        """Whether calls do not have its name: constructors and operators are taken to be called."""
        return self.name == self.struct or self.name.startswith("operator")


@cache
def without_remarks(source: str) -> str:
    """A kernel's text without comments and the content of strings."""
    return _REMARKS.sub(lambda found: '""' if found.group()[0] == '"' else " ", source)


def uncalled(source: str) -> list[str]:
    """The functions of a kernel's text that no entry calls, nor a function that one calls."""
    text = without_remarks(source)
    defined = structs(text)
    waiting = functions(text, defined)
    rest = _without(text, [(one.start, one.end) for one in waiting])
    entries = _without(rest, [(start, end) for _, start, end in defined])
    reached = {*_calls(entries, member=False)}
    reached |= {call for _, start, end in defined for call in _calls(rest[start:end], member=True)}
    reached |= {one.called for one in waiting if one.named_otherwise}
    while alive := [one for one in waiting if one.called in reached]:
        waiting = [one for one in waiting if one not in alive]
        reached |= {call for one in alive for call in _calls(one.body, member=bool(one.struct))}
    return [one.title for one in waiting]


def functions(text: str, structs: list[Struct]) -> list[Function]:
    """Every device function of a text without remarks, which has these structs."""
    made = []
    for one in _FUNCTION.finditer(text):
        around = [struct for struct in structs if struct[1] < one.start() < struct[2]]
        name = max(around, key=lambda struct: struct[1])[0] if around else ""
        end = _body_end(text, _closed(text, one.end() - 1))
        made.append(Function(name, one[1], one.start(), end, text[one.end() : end]))
    if len(made) != text.count("__device__"):
        raise ValueError("a device function that is not understood")
    return made


@cache
def structs(text: str) -> list[Struct]:
    """Every struct of a text without remarks."""
    return [(one[1], one.start(), _closed(text, one.end() - 1)) for one in _STRUCT.finditer(text)]


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """A text with nothing that says anything in these places."""
    for start, end in spans:
        text = text[:start] + ";" * (end - start) + text[end:]
    return text


def _calls(text: str, *, member: bool) -> Iterator[Called]:
    """What a text calls: in a member, a name without more may be one of a member, too."""
    for one in _CALL.finditer(text):
        if one[1] or member:
            yield True, one[2]
        if not one[1]:
            yield False, one[2]


def _closed(text: str, at: int) -> int:
    """Where the brackets end that begin at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in "({[") - (text[place] in ")}]")
        if depth == 0:
            return place + 1
    raise ValueError(f"brackets that do not end: {text[at : at + 80]}")


def _body_end(text: str, at: int) -> int:
    """Where a function ends whose parameters do at `at`; what a constructor sets has brackets."""
    while True:
        found = _UP_TO_BODY.match(text, at)
        assert found
        place = found.end()
        if text[place] == ";":
            return place + 1
        end = _closed(text, place)
        if text[place] == "{" and text[:place].rstrip().endswith(_BEFORE_BODY):
            return end
        at = end

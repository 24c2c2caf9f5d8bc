"""A YAML file, read strictly: plain JSON values, the line of each, and every problem met.

YAML 1.1 reads `128:32` as 7712, `017` as 15 and `on` as true; merge keys and tags hide what a file
says. All of these are problems here, as are duplicate keys, a second document, files over 1 MB and
nesting deeper than 8. Plain aliases are allowed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from warploom.errors import ConfigurationError
from warploom.generator import json_file

MAXIMUM_BYTES = 1_000_000
MAXIMUM_DEPTH = 8
MAXIMUM_VALUES = 100_000  # after aliases, which could otherwise multiply without end

Place = tuple[str | int, ...]  # the keys and indexes that lead to a value

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_PLAIN = {  # what a scalar of a type may look like: the spellings that YAML 1.1 and 1.2 share
    "bool": r"true|false",
    "int": r"-?(0|[1-9][0-9]{0,17})",
    "float": r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}",
}
_SURPRISES = {
    "bool": ("YAML 1.1 reads this as a truth value", "write true or false, or quote it"),
    "int": (
        "YAML 1.1 reads this as a number of another base, or it is too long",
        "write plain decimal digits, and a tile as a list: [128, 256, 64]",
    ),
    "float": (
        "YAML 1.1 reads this as a number of base 60, or it is not a plain decimal",
        "write plain decimal digits",
    ),
    "timestamp": ("YAML 1.1 reads this as a date", "quote it"),
}


@dataclass(slots=True)
class Document:
    """The content of one file; `value` is whatever JSON holds.

    A value without a line of its own, such as a missing field, has the line of what it belongs to.
    """

    file: str
    value: object = None
    lines: dict[Place, int] = field(default_factory=dict)
    problems: dict[Place, tuple[int, ConfigurationError]] = field(default_factory=dict)

    def where(self, place: Place, line: int | None = None) -> str:
        """Return `file:line: field` of a place."""
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
        name = name.replace("\n", "\\n")  # a line has one problem
        return f"{self.file}:{line or self._line(place)}: {name.removeprefix('.') or 'file'}"

    def report(
        self, place: Place, value: str, rule: str, fix: str, line: int | None = None
    ) -> None:
        """Note a problem, unless there is one at that very place already."""
        short = value if len(value) <= 60 else f"{value[:57]}..."
        error = ConfigurationError(f"{self.where(place, line)}: {short}", rule=rule, fix=fix)
        self.problems.setdefault(place, (line or self._line(place), error))

    def check(self) -> None:
        """Raise every problem noted so far as one ConfigurationError, in the order of lines."""
        if self.problems:
            ordered = sorted(self.problems.values(), key=lambda problem: problem[0])
            raise together([error for _, error in ordered])

    def _line(self, place: Place) -> int:
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def together(errors: list[ConfigurationError]) -> ConfigurationError:
    """Return one error that says all of `errors`, a line for each."""
    return errors[0] if len(errors) == 1 else ConfigurationError("\n".join(map(str, errors)))


def read(path: Path) -> Document:
    """Read the YAML file at `path`.

    Problems that leave something to go on with are noted in the document; of the others, a
    ConfigurationError is raised.
    """
    document = Document(str(path))
    node = _compose(document, _text(path))
    document.value = _Values(document).of(node, ())
    return document


def _line(piece: Any) -> int:  # noqa: ANN401 (the parsers in C and in Python have types of their own)
    return int(piece.start_mark.line) + 1


def _fail(document: Document, line: int, value: str, rule: str, fix: str) -> NoReturn:
    raise ConfigurationError(f"{document.file}:{line}: file: {value}", rule=rule, fix=fix)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAXIMUM_BYTES + 1)
        if len(content) <= MAXIMUM_BYTES:
            return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot be read", rule=json_file.reason(error), fix="check the path"
        ) from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}:{line}: file: byte {content[error.start]:#04x}",
            rule="a configuration is UTF-8",
            fix="save it as UTF-8",
        ) from error
    raise ConfigurationError(
        f"{path}:1: file: over {MAXIMUM_BYTES} bytes",
        rule=f"a configuration has at most {MAXIMUM_BYTES}",
        fix="split it",
    )


def _compose(document: Document, text: str) -> yaml.Node:
    try:
        # By events first: a parser of nodes recurses, and hostile nesting would overflow its stack.
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAXIMUM_DEPTH:
                _too_deep(document, _line(event))
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        _fail(
            document,
            mark.line + 1 if mark else 1,
            "YAML",
            str(problem),
            "a configuration is one document of valid YAML",
        )
    if node is None:
        _fail(document, 1, "empty", "a configuration has fields", "see configs/*/smoke.yaml")
    return node


def _too_deep(document: Document, line: int) -> NoReturn:
    rule = f"nesting goes at most {MAXIMUM_DEPTH} deep"
    _fail(document, line, "a list or mapping", rule, "see configs/*/smoke.yaml for the form")


class _Values:
    """Turns nodes into values, and notes in the document where each is and what is wrong."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0

    def of(self, node: yaml.Node, place: Place, depth: int = 0) -> object:
        """Return the value of `node`, which stands `depth` deep at `place`."""
        line = _line(node)
        self.count += 1
        if self.count > MAXIMUM_VALUES:
            rule = f"aliases included, a configuration has at most {MAXIMUM_VALUES} values"
            _fail(self.document, line, "an alias", rule, "write fewer values")
        self.document.lines.setdefault(place, line)
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, tag, place)
        if depth == MAXIMUM_DEPTH:  # an alias can nest deeper than the text does
            _too_deep(self.document, line)
        if tag not in ("seq", "map"):
            self._tagged(place, node.tag)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self.of(item, (*place, index), depth + 1) for index, item in items]
        return self._mapping(node, place, depth)

    def _mapping(self, node: yaml.Node, place: Place, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.document.report(place, "a key", "a key is a plain word", "write a field name")
                continue
            key = key_node.value
            inner = (*place, key)
            if key in values:
                rule = f"line {self.document.lines[inner]} gives it already"
                self.document.report(inner, "duplicate key", rule, "keep one of them", line)
                continue
            self.document.lines[inner] = line
            values[key] = self.of(value_node, inner, depth + 1)
            if key_node.tag == f"{_TAG}merge":
                rule = "merge keys hide what a file says"
                self.document.report(inner, "merge", rule, "write the fields out")
        return values

    def _scalar(self, node: yaml.ScalarNode, tag: str, place: Place) -> object:
        text: str = node.value
        if tag in ("str", "null"):
            return text if tag == "str" else None
        if tag in _PLAIN and re.fullmatch(_PLAIN[tag], text):
            return json.loads(text)
        if tag in _SURPRISES:
            self.document.report(place, text, *_SURPRISES[tag])
        else:
            self._tagged(place, node.tag)
        return None

    def _tagged(self, place: Place, tag: str) -> None:
        self.document.report(place, tag, "a configuration has no tags", "write a plain value")

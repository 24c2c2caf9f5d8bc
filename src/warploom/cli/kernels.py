"""Finding a kernel by what a person has of it: a name, a file of that name, a digest, or a key.

Every command that takes a kernel asks here, so that all of them know it by all of these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from pathlib import Path

from warploom.cli.arguments import STANDARD_INPUT
from warploom.errors import StoreError, UnknownNameError
from warploom.generator.names import file
from warploom.generator.specification import KernelSpec, parse_name

FEWEST, MOST = 8, 64  # digits of a digest or a key
NEAR = 3  # kernels that are told of one that there is not,
ALIKE = 5  # and the characters that they must begin with alike
SUFFIXES = (".cu", ".cubin")
_DIGITS = re.compile(r"[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Found:
    """A kernel that was meant.

    spec   None where this version cannot make it: the store has it of another one
    key    of the store's record, where that was written
    """

    name: str
    spec: KernelSpec | None
    key: str | None = None


def found(written: str, path: Path | None = None) -> Found:
    """Return the kernel that `written` means.

    Args:
        written: A name; a path whose last part is one, with or without a suffix; a digest, which
            a name ends in, or a key of the store, of either at least 8 digits.
        path: A configuration that a digest is looked for in, before the store and the package's.

    Raises:
        UnknownNameError: For no kernel, and for digits that several begin with.
    """
    word = Path(written).name
    word = word.removesuffix(Path(word).suffix)
    if not _DIGITS.fullmatch(word):
        return _called(word, written)
    if not FEWEST <= len(word) <= MOST:
        raise UnknownNameError(
            f"digest {word}",
            rule=f"must have {FEWEST} to {MOST} digits; it has {len(word)}",
            fix="give the digits that a kernel's name ends in, or more of them",
        )
    return _of_digits(word.lower(), path)


def named(written: str, path: Path | None = None) -> KernelSpec:
    """Return the spec of the kernel that `written` means, as `found` finds it."""
    one = found(written, path)
    return one.spec or parse_name(one.name)  # whose error says what differs in this version


def listed(path: Path) -> list[KernelSpec]:
    """Return the kernels of a configuration, or the one that is written in place of a path.

    Raises UnknownNameError for a kernel that there is not, and ConfigurationError for a file.
    """
    from warploom.generator.families import names
    from warploom.generator.space import expand_file

    word = path.name
    kernel = path.suffix in SUFFIXES or (
        path != STANDARD_INPUT
        and not os.path.exists(path)  # noqa: PTH110 (for a name that is too long, Path's raises)
        and (_DIGITS.fullmatch(word) or word.startswith(tuple(f"{name}_sm" for name in names())))
    )
    return [named(str(path))] if kernel else list(expand_file(path).specs)


def _called(word: str, written: str) -> Found:
    """The kernel of a name, or of a file's name, which is cut where a name is too long for one."""
    try:
        return Found(word, parse_name(word))
    except UnknownNameError as error:
        stored = [name for name, _ in _stored()]
        if word in stored:
            return Found(word, None)
        for name in _names():
            if any(file(name, suffix[1:]) == f"{word}{suffix}" for suffix in SUFFIXES):
                with suppress(UnknownNameError):
                    return Found(name, parse_name(name))
        near = _near(word, _names())
        if "this version's is" in error.fix or not near:
            raise
        raise UnknownNameError(
            f"kernel name {written!r}", rule=error.rule, fix=f"{error.fix}; {near}"
        ) from error


def _of_digits(digits: str, path: Path | None) -> Found:
    """The one kernel whose digest, or whose key in the store, begins so."""
    for place in _places(digits, path):
        if len({(one.name, one.key) for one in place}) > 1:
            told = ", ".join(f"{one.name}{f' (key {one.key})' if one.key else ''}" for one in place)
            raise UnknownNameError(
                f"digest {digits}",
                rule=f"must be of one kernel; {len(place)} begin so: {told}",
                fix="give more digits, or the kernel's name",
            )
        if place:
            return place[0]
    where = f"{path}, " if path else ""
    every = [*(name[-FEWEST:] for name in _names()), *(key for _, key in _stored())]
    near = _near(digits, every)
    raise UnknownNameError(
        f"digest {digits}",
        rule=f"must be that of a kernel of {where}the package's configurations or the store, or "
        "a key of the store",
        fix="give the kernel's name, or with --in the configuration that it is of"
        + (f"; {near}" if near else ""),
    )


def _places(digits: str, path: Path | None) -> Iterator[list[Found]]:
    """The kernels that digits may mean in each place, in the order that places are asked."""
    from warploom.generator import configurations
    from warploom.generator.space import expand_file

    def of(specs: Iterable[KernelSpec]) -> list[Found]:
        return [Found(one.name, one) for one in specs if one.digest.startswith(digits)]

    if path:
        yield of(expand_file(path).specs)
    kept: dict[tuple[str, str | None], Found] = {}
    for name, key in _stored():
        if name.endswith(digits[:FEWEST]):
            spec = _parsed(name)
            if spec.digest.startswith(digits) if spec else len(digits) == FEWEST:
                kept[name, None] = Found(name, spec)
        if key.startswith(digits):
            kept[name, key] = Found(name, _parsed(name), key)
    yield list(kept.values())
    for shipped in configurations.every():
        yield of(_shipped(shipped))


@cache
def _shipped(path: Path) -> tuple[KernelSpec, ...]:
    """The kernels of a configuration of the package, whose files do not change."""
    from warploom.generator.space import expand_file

    return tuple(expand_file(path).specs)


def _stored() -> list[tuple[str, str]]:
    """The names of the store's kernels, and their keys; none where it cannot be read."""
    from warploom.generator.store import Store

    with suppress(StoreError):  # which is no reason not to look elsewhere
        return Store.default().listed()
    return []


def _parsed(name: str) -> KernelSpec | None:
    with suppress(UnknownNameError):  # of another version
        return parse_name(name)
    return None


def _names() -> list[str]:
    """The names of all kernels of the store and the package's configurations."""
    from warploom.generator import configurations

    shipped = (spec.name for one in configurations.every() for spec in _shipped(one))
    return [*(name for name, _ in _stored()), *shipped]


def _near(word: str, known: Iterable[str]) -> str:
    """Those of the known words that begin most like one."""
    lengths = {one: len(commonprefix([word, one])) for one in known}  # noqa: RUF071 (no paths)
    longest = max(lengths.values(), default=0)
    if longest < ALIKE:
        return ""
    near = [one for one, length in lengths.items() if length == longest]
    return f"near: {', '.join(near[:NEAR])}"

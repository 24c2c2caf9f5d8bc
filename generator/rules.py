"""Predicates that every family shares: each returns None, or the reason with the values in it.

Loading a configuration, expanding a space, tuning and the tests all call these same functions;
no constraint is stated anywhere else. A family lists its own rules beside its operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, get_args, get_origin

from warploom.generator.architectures import Architecture
from warploom.generator.knob import Knob, knobs, types

Reason = str | None


@dataclass(frozen=True, slots=True)
class Check:
    """A rule that was checked: what it is of, the value, and what this must be."""

    name: str
    value: object
    rule: str


@dataclass(slots=True)
class Checks:
    """The rules that were checked: those with a value and a limit, and how many in all."""

    named: list[Check] = field(default_factory=list)
    total: int = 0


_noted: ContextVar[Checks | None] = ContextVar("warploom_rules", default=None)


@contextmanager
def noting() -> Iterator[Checks]:
    """Yield what will have the rules that this thread checks inside of the block."""
    checks = Checks()
    token = _noted.set(checks)
    try:
        yield checks
    finally:
        _noted.reset(token)


def one_of(field: str, value: object, allowed: Sequence[object]) -> Reason:
    """`value` is one of `allowed`."""
    if (checks := _noted.get()) is not None:
        checks.named.append(Check(field, value, f"one of {', '.join(map(str, allowed))}"))
    for choice in allowed:
        if value == choice and type(value) is type(choice):
            return None
    choices = ", ".join(map(str, allowed))
    return f"{field} {value!r}: must be {'one of ' if len(allowed) > 1 else ''}{choices}"


def multiple_of(field: str, value: int, divisor: int) -> Reason:
    """`value` is a positive multiple of `divisor`."""
    if (checks := _noted.get()) is not None:
        checks.named.append(Check(field, value, f"a positive multiple of {divisor}"))
    if value > 0 and divisor > 0 and value % divisor == 0:
        return None
    return f"{field} {value}: must be a positive multiple of {divisor}"


def wgmma_n(field: str, n: int, *, integer: bool) -> Reason:
    """`n` is legal for wgmma (PTX ISA): multiples of 8 to 256; int8 has 8, 16, 24 and then 16s."""
    step = "8, 24 and multiples of 16" if integer else "multiples of 8"
    if (checks := _noted.get()) is not None:
        checks.named.append(Check(field, n, f"{step}, at most 256 (the n of wgmma)"))
    if n in range(8, 257, 8) and (not integer or n <= 24 or n % 16 == 0):
        return None
    return f"{field} {n}: must be what wgmma takes: {step}, at most 256"


def fits_shared(used: int, arch: Architecture) -> Reason:
    """Dynamic shared memory is within what one block may opt in to."""
    if (checks := _noted.get()) is not None:
        checks.named.append(Check("shared memory", used, f"at most {arch.shared_bytes} bytes"))
    if used <= arch.shared_bytes:
        return None
    return (
        f"shared memory {used} bytes: {arch.name} gives a block {arch.shared_bytes}; "
        "use fewer stages or a smaller tile"
    )


def fits_registers(registers: int, budget: int) -> Reason:
    """What a thread is expected to hold fits its registers without spills."""
    if (checks := _noted.get()) is not None:
        checks.named.append(Check("registers expected of a thread", registers, f"at most {budget}"))
    if registers <= budget:
        return None
    return (
        f"{registers} registers expected, {budget} to have: use a smaller tile, two consumers, or "
        "fewer epilogue operands"
    )


def broken(reasons: Iterable[Reason]) -> list[str]:
    """Return the reasons that are not None."""
    found = [*reasons]
    if (checks := _noted.get()) is not None:
        checks.total += len(found)
    return [*filter(None, found)]


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a field may hold.

    choices      each with its type, since True is no 1; none for integers
    least, most  of an integer
    items        of a tuple of integers, so many; 0 for one integer
    """

    name: str
    choices: tuple[tuple[type, object], ...] = ()
    least: float = -math.inf
    most: float = math.inf
    items: int = 0
    said: Knob = field(default_factory=Knob)

    def reason(self, value: object) -> Reason:
        """Why it may not hold `value`."""
        if self.choices:
            return one_of(self.name, value, [choice for _, choice in self.choices])
        if self.items:
            return f"{self.name} {value!r}: must be {self.items} integers"
        if type(value) is not int:
            return f"{self.name} {value!r}: must be an integer"
        return f"{self.name} {value}: must be {self.said.span}"


def fields(record: object) -> list[str]:
    """Every field of the dataclass holds what it is declared with: its type, and its knob's range.

    Fields that are neither Literals, bools, integers nor tuples of so many integers are not looked
    at. Every spec and every call's operation pass here: what is legal is seen without a function.
    """
    kind: type = type(record)
    illegal: list[Reason] = []
    for declared in _declarations(kind):
        value = getattr(record, declared.name)
        if declared.choices:
            legal = (type(value), value) in declared.choices
        elif declared.items:
            legal = isinstance(value, tuple) and [*map(type, value)] == [int] * declared.items
        else:
            legal = type(value) is int and declared.least <= value <= declared.most
        if not legal:
            illegal.append(declared.reason(value))
    return broken(illegal) if illegal else []


@cache
def _declarations(kind: type) -> tuple[_Declared, ...]:
    said = knobs(kind)
    every = (_declared(name, hint, said[name]) for name, hint in types(kind).items())
    return tuple(declared for declared in every if declared)


def _declared(name: str, hint: object, said: Knob) -> _Declared | None:
    arguments = (False, True) if hint is bool else get_args(hint)
    if hint is bool or get_origin(hint) is Literal:
        return _Declared(name, tuple((type(choice), choice) for choice in arguments))
    if hint is int:
        least = -math.inf if said.least is None else said.least
        return _Declared(
            name, least=least, most=math.inf if said.most is None else said.most, said=said
        )
    if get_origin(hint) is tuple and set(arguments) == {int}:
        return _Declared(name, items=len(arguments))
    return None

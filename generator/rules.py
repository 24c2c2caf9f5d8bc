"""Predicates that every family shares: each returns None, or the reason with the values in it.

Loading a configuration, expanding a space, tuning and the tests all call these same functions;
no constraint is stated anywhere else. A family lists its own rules beside its operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

from warploom.generator.architectures import Architecture
from warploom.generator.knob import Knob, knobs, types

Reason = str | None


def one_of(field: str, value: object, allowed: Sequence[object]) -> Reason:
    """`value` is one of `allowed`."""
    if any(value == one and type(value) is type(one) for one in allowed):
        return None
    listed = ", ".join(map(str, allowed))
    return f"{field} {value!r}: must be {'one of ' if len(allowed) > 1 else ''}{listed}"


def multiple_of(field: str, value: int, divisor: int) -> Reason:
    """`value` is a positive multiple of `divisor`."""
    if value > 0 and divisor > 0 and value % divisor == 0:
        return None
    return f"{field} {value}: must be a positive multiple of {divisor}"


def wgmma_n(field: str, n: int, *, integer: bool) -> Reason:
    """`n` is legal for wgmma (PTX ISA): multiples of 8 to 256; int8 has 8, 16, 24 and then 16s."""
    legal = [n for n in range(8, 257, 8) if not integer or n <= 24 or n % 16 == 0]
    if n in legal:
        return None
    step = "8, 24 and multiples of 16" if integer else "multiples of 8"
    return f"{field} {n}: must be what wgmma takes: {step}, at most 256"


def fits_shared(used: int, arch: Architecture) -> Reason:
    """Dynamic shared memory is within what one block may opt in to."""
    if used <= arch.shared_bytes:
        return None
    return (
        f"shared memory {used} bytes: {arch.name} gives a block {arch.shared_bytes}; "
        "use fewer stages or a smaller tile"
    )


def fits_registers(registers: int, budget: int) -> Reason:
    """What a thread is expected to hold fits its registers without spills."""
    if registers <= budget:
        return None
    return (
        f"{registers} registers expected, {budget} to have: use a smaller tile, two consumers, or "
        "fewer epilogue operands"
    )


def broken(reasons: Iterable[Reason]) -> list[str]:
    """Return the reasons that are not None."""
    return [reason for reason in reasons if reason is not None]


def fields(record: object) -> list[str]:
    """Every field of the dataclass holds what it is declared with: its type, and its knob's range.

    Fields that are neither Literals, bools, integers nor tuples of so many integers are not looked
    at.
    """
    kind: type = type(record)
    return broken(check(getattr(record, name)) for name, check in _checks(kind).items())


@cache
def _checks(kind: type) -> dict[str, Callable[[Any], Reason]]:
    said = knobs(kind)
    checks = {name: _check(name, hint, said[name]) for name, hint in types(kind).items()}
    return {name: check for name, check in checks.items() if check}


def _check(field: str, hint: object, said: Knob) -> Callable[[Any], Reason] | None:
    arguments = (False, True) if hint is bool else get_args(hint)
    if hint is bool or get_origin(hint) is Literal:
        return lambda value: one_of(field, value, arguments)
    if hint is int:
        return lambda value: _integer(field, value, said)
    if get_origin(hint) is tuple and set(arguments) == {int}:
        return lambda value: _integers(field, value, len(arguments))
    return None


def _integer(field: str, value: object, said: Knob) -> Reason:
    if type(value) is not int:
        return f"{field} {value!r}: must be an integer"
    return None if said.nearest(value) == value else f"{field} {value}: must be {said.span}"


def _integers(field: str, value: object, count: int) -> Reason:
    if isinstance(value, tuple) and [type(one) for one in value] == [int] * count:
        return None
    return f"{field} {value!r}: must be {count} integers"

"""Predicates that every family shares: each returns None, or the reason with the values in it.

Loading a configuration, expanding a space, tuning and the tests all call these same functions;
no constraint is stated anywhere else. A family lists its own rules beside its operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

from warploom.generator.architectures import Architecture

Reason = str | None


def one_of(field: str, value: object, allowed: Sequence[object]) -> Reason:
    """`value` is one of `allowed`."""
    if value in allowed:
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


def literals(record: object) -> list[str]:
    """Every field that the dataclass of `record` declares a Literal holds one of its values."""
    kind: type = type(record)
    return broken(
        one_of(field, getattr(record, field), allowed) for field, allowed in _literals(kind).items()
    )


@cache
def _literals(kind: type) -> dict[str, tuple[object, ...]]:
    hints = get_type_hints(kind)
    return {field: get_args(hint) for field, hint in hints.items() if get_origin(hint) is Literal}

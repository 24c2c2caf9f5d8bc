"""The shape of a problem: the extents that decide how long it takes, whatever its memory layout.

Kernels count in 32 bits, with a sign: what would take them further is refused.

Records are kept by shape, and the model predicts for it. Each family has its own; what is written
of one on a command line is read with `extents_of` and `named_of`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from warploom.errors import ProblemError
from warploom.suggestions import suggestion

LARGEST = 2**31 - 1  # that kernels count to


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A family's shape is a frozen dataclass of integers.

    optional   the extents that are 0 where there is none
    calls      the extents in which the calls of one layer differ, where its records tell of these
    """

    optional: ClassVar[frozenset[str]] = frozenset()
    calls: ClassVar[frozenset[str]] = frozenset()

    def __str__(self) -> str:
        """The shape for people: the extents that are not 0, by name."""
        return " ".join(f"{name}{value}" for name, value in asdict(self).items() if value)

    @property
    def empty(self) -> str:
        """The first extent that is not positive, of which nothing was measured; "" if all are."""
        values = asdict(self).items()
        return next((name for name, value in values if value < (name not in self.optional)), "")

    @property
    def compared(self) -> tuple[int, ...]:
        """What shapes are near in: every extent, and what else schedules depend on."""
        return tuple([getattr(self, f.name) for f in fields(self)])

    @property
    def layer(self) -> tuple[int, ...]:
        """The extents that all calls of a layer have."""
        return tuple([getattr(self, f.name) for f in fields(self) if f.name not in self.calls])


@dataclass(frozen=True, slots=True)
class Work:
    """What a problem asks of any kernel: the least that a roofline counts.

    flops   operations of the tensor core, a multiplication and an addition each
    bytes   of memory, where each operand is read once and each result written once
    bits    of the operands that are multiplied, which decide the tensor core's rate
    """

    flops: float
    bytes: float
    bits: int = 16


def distance(one: Shape, other: Shape) -> float:
    """How far shapes of a family are apart: the sum over extents of |log2| of their ratios.

    Infinite where an extent differs by more than a factor of 4, or is 0 in one alone: what was
    measured there says nothing here.
    """
    total = 0.0
    for x, y in zip(one.compared, other.compared, strict=True):
        if x == y:
            continue
        if not (x and y) or max(x, y) > 4 * min(x, y):
            return math.inf
        total += abs(math.log2(x / y))
    return total


# ---- As they are written -------------------------------------------------------------------------


def extents_of(text: str, names: Sequence[Sequence[str]], what: str) -> dict[str, int]:
    """The numbers of `4096x6144x4096`, named by whichever of `names` has as many.

    ProblemError for another count, of a shape of `what`, and for a number that no extent has.
    """
    numbers = text.split("x")
    fitting = [listed for listed in names if len(listed) == len(numbers)]
    if not fitting:
        forms = " or ".join("x".join(listed) for listed in names)
        rule = f"a shape of {what} must be {forms}"
        raise ProblemError(f"shape {text!r}", rule=rule, fix="count its sizes")
    found = zip(fitting[0], numbers, strict=True)
    return {name: _number(text, name, number) for name, number in found}


def named_of(
    text: str, given: Sequence[str], wanted: Sequence[str], what: str, others: str
) -> dict[str, int]:
    """The numbers of `name=128` and its like in `text`, which are those `wanted` of `what`.

    ProblemError for one that is missing, or of others: it tells what these are of.
    """
    found = {}
    for name, _, number in (entry.partition("=") for entry in given):
        if name not in wanted:
            rule = f"must be {' and '.join(wanted)}" if wanted else "must be left out"
            fix = suggestion(name, wanted) or others
            raise ProblemError(f"shape {text!r}: {name!r}", rule=f"{rule} for {what}", fix=fix)
        found[name] = _number(text, name, number)
    if missing := "".join(f":{name}=NUMBER" for name in wanted if name not in found):
        raise ProblemError(
            f"shape {text!r}",
            rule=f"must end with {missing} for {what}",
            fix=f"for instance {text}{missing.replace('NUMBER', '1024')}",
        )
    return found


def _number(text: str, name: str, number: str) -> int:
    """A number of a shape; ProblemError for one that no extent has."""
    if not re.fullmatch(r"0*[1-9][0-9]*", number):
        raise ProblemError(
            f"shape {text!r}: {name} {number!r}",
            rule="must be an integer greater than 0",
            fix="write positive numbers",
        )
    if len(number) > 10 or int(number) > LARGEST:
        raise ProblemError(
            f"shape {text!r}: {name} {number}",
            rule=f"must be at most {LARGEST}",
            fix="give a smaller one",
        )
    return int(number)


def refuse_beyond(counted: Mapping[str, int]) -> None:
    """Raise ProblemError where a kernel would count beyond LARGEST.

    `counted` has the largest number that its arithmetic reaches, or one that is little larger, by
    what of the call it comes from.
    """
    for what, reached in counted.items():
        if reached > LARGEST:
            raise ProblemError(
                what,
                rule=f"must be smaller: kernels count to {LARGEST}, and this takes {reached}",
                fix="split the call into several",
            )

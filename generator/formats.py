"""The one table of formats of weights in few bits: codes, zero points, scales, and their bits.

A weight W [N, K] is scale[n, k // group] * (code[n, k] - zero[n, k // group]), exactly; a format
without zero points has zero = 0, and the codes of a float are the bits of what they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warploom.errors import UnknownNameError
from warploom.generator.elements import ELEMENTS

Field = tuple[int, int]  # a register of wgmma's A operand, and one of the elements in it

WORD_BITS = 32
REGISTERS = 4  # of A in a thread: (row, low k), (row + 8, low k), (row, high k), (row + 8, high k)
STEPS = (16, 32)  # k of one wgmma, by the bytes of an activation: two and one


@dataclass(frozen=True, slots=True)
class ScaleType:
    """A type of scales: its bytes, and what torch calls it."""

    name: str
    bytes: int
    torch: str


SCALE_TYPES: Mapping[str, ScaleType] = {
    **{
        name: ScaleType(name, ELEMENTS[name].bytes, ELEMENTS[name].torch)
        for name in ("fp16", "bf16", "fp32")
    },
    # 2^(e - 127); 255 is NaN, and refused (OCP Microscaling Formats 1.0, E8M0).
    "e8m0": ScaleType("e8m0", 1, "float8_e8m0fnu"),
}


def elements_of(step: int) -> int:
    """Elements of an activation in one register: 2 of 16 bits, 4 of 8."""
    return step // 8


def in_order(step: int) -> tuple[Field, ...]:
    """Each register's elements one after the other, the first in the lowest bits."""
    return tuple((r, e) for r in range(REGISTERS) for e in range(elements_of(step)))


def pairs_apart(step: int) -> tuple[Field, ...]:
    """All registers' first elements, then all their second ones, and so on.

    For nibbles and registers of two: (word >> 4 i) & 0x000f000f is register i.
    """
    return tuple((r, e) for e in range(elements_of(step)) for r in range(REGISTERS))


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format. What is stored of a code is `bits` bits of code + `offset`, modulo 2^bits.

    `orders` says, for each step, which register and element each field of the step's words holds,
    from bit 0 of the first word up: field f lies at bit f * bits % 32 of word f * bits // 32.
    """

    name: str
    bits: int
    lowest: int
    highest: int
    codes: str  # torch's name for the type of codes
    orders: Mapping[int, tuple[Field, ...]]
    offset: int = 0
    highest_zero: int | None = None  # zero points are 0 to this; None: there are none
    nans: tuple[int, ...] = ()  # codes that stand for no number
    scales: tuple[str, ...] = ("bf16", "fp16", "fp32")  # the default first
    groups: tuple[int | None, ...] = (128, 64, 32, None)  # of k; None: all of it, per channel

    @property
    def has_zeros(self) -> bool:
        """True where each group has a zero point."""
        return self.highest_zero is not None

    def words(self, step: int) -> int:
        """How many 32-bit words a thread has of one step."""
        return len(self.orders[step]) * self.bits // WORD_BITS


# fmt: off
_TABLE = (
    WeightFormat("int4",  4, lowest=-8,   highest=7,   codes="int8",          offset=8,
                 orders={16: pairs_apart(16), 32: in_order(32)}),
    # Zero points of GPTQ checkpoints reach 16: they store one less.
    WeightFormat("uint4", 4, lowest=0,    highest=15,  codes="uint8",         highest_zero=16,
                 orders={16: pairs_apart(16), 32: in_order(32)}),
    WeightFormat("int8",  8, lowest=-128, highest=127, codes="int8",
                 orders={16: in_order(16), 32: in_order(32)}),
    WeightFormat("e4m3",  8, lowest=0,    highest=255, codes="float8_e4m3fn", nans=(0x7F, 0xFF),
                 orders={16: in_order(16), 32: in_order(32)}),
    # Bits of e2m1: a sign, two of exponent, one of mantissa.
    WeightFormat("mxfp4", 4, lowest=0,    highest=15,  codes="uint8",
                 orders={16: in_order(16), 32: in_order(32)}, scales=("e8m0",), groups=(32,)),
)
# fmt: on
FORMATS: Mapping[str, WeightFormat] = {row.name: row for row in _TABLE}


def weight_format(name: str) -> WeightFormat:
    """Return the format called `name`, or raise UnknownNameError listing all."""
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name]
    raise UnknownNameError(
        f"weight format {name!r}",
        rule=f"must be one of {', '.join(FORMATS)}",
        fix="use one of them",
    )

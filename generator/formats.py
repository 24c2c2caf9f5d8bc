"""The one table of formats of weights in few bits: codes, zero points, scales, and their bits.

A weight W [N, K] is scale[n, k // group] * (code[n, k] - zero[n, k // group]), exactly; a format
without zero points has zero = 0, and the codes of a float are the bits of what they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from warploom.errors import UnknownNameError
from warploom.generator.elements import ELEMENTS

Activations = Literal["16-bit", "e4m3", "int8"]  # fp16 and bf16 take the same bits

WORD_BITS = 32
REGISTERS = 4  # of A in a thread: (row, low k), (row + 8, low k), (row, high k), (row + 8, high k)
STEPS: Mapping[str, int] = {"16-bit": 16, "e4m3": 32, "int8": 32}  # k of one wgmma


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
    "e4m3": ScaleType("e4m3", 1, "float8_e4m3fn"),
}


def activations_of(element: str) -> Activations:
    """Return what weights are packed for that are multiplied by an element type."""
    return element if element in ("e4m3", "int8") else "16-bit"  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class WordOrder:
    """Where the codes that a thread gives one wgmma lie in its words, bit by bit, and as what.

    Bit b of a code of register i's first element is bit `registers[i][b]`, counted from the first
    word; each next element's is `apart[b]` further, round its word. Elements are halves or bytes of
    the register, the lowest first. Stored is code + `offset`, modulo 2^bits, or, with
    `sign_lowest`, 2 q where a code q is not negative, and 2 (-1 - q) + 1 where it is.

    Where two steps share their words, the codes of every second one are `second` bits further.

    `largest_scale` is that of a group, in size, up to which decoding may multiply scales into
    weights: neither it nor they leave bf16 or fp16 on the way. None: no kernel does.
    """

    registers: tuple[tuple[int, ...], ...]
    apart: tuple[int, ...]
    offset: int = 0
    sign_lowest: bool = False
    largest_scale: float | None = None
    second: int | None = None

    @property
    def steps(self) -> int:
        """How many steps' codes the words have."""
        return 1 if self.second is None else 2

    @property
    def words(self) -> int:
        """How many 32-bit words a thread has of one step, or of the two that share them."""
        return 1 + max(place for bits in self.registers for place in bits) // WORD_BITS

    def place(self, register: int, element: int, bit: int, step: int = 0) -> int:
        """Where a bit of what is stored of a code lies, counted from bit 0 of the first word.

        `step` counts those that share their words.
        """
        first = self.registers[register][bit] + step * (self.second or 0)
        within = (first + element * self.apart[bit]) % WORD_BITS
        return first // WORD_BITS * WORD_BITS + within


def _whole(bits: int, first: tuple[int, ...], apart: int, **how: Any) -> WordOrder:
    """Fields of `bits` bits: those of the registers' first elements, and how far the next is."""
    places = tuple(tuple(bits * field + bit for bit in range(bits)) for field in first)
    return WordOrder(places, (bits * apart,) * bits, **how)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format. `orders` has how its codes are packed, by the activations that they multiply."""

    name: str
    bits: int
    lowest: int
    highest: int
    codes: str  # torch's name for the type of codes
    orders: Mapping[str, WordOrder]
    highest_zero: int | None = None  # zero points are 0 to this; None: there are none
    nans: tuple[int, ...] = ()  # codes that stand for no number
    scales: tuple[str, ...] = ("bf16", "fp16", "fp32")  # the default first
    groups: tuple[int | None, ...] = (128, 64, 32, None)  # of k; None: all of it, per channel
    decoded_as: str = ""  # the format whose decoding parts it has; empty: its own
    one_scale: bool = False  # `quantize` gives all channels one where scales are per channel
    scaled_twice: bool = False  # by a scale of fp32 for each row beside those of groups

    @property
    def has_zeros(self) -> bool:
        """True where each group has a zero point."""
        return self.highest_zero is not None


# Each order is the one that takes the fewest instructions to decode: templates/mixed_gemm/decode.
_E2M1 = WordOrder(
    ((6, 7, 8, 15), (12, 13, 14, 21), (2, 3, 4, 11), (0, 1, 10, 9)), apart=(16,) * 4
)  # by 16 bits: one of mantissa, two of exponent, a sign
_TWO_BITS = {
    "16-bit": _whole(2, (0, 1, 2, 3), apart=8, offset=2, largest_scale=1024, second=8),
    "int8": _whole(2, (0, 1, 2, 3), apart=4),
}
# fmt: off
_TABLE = (
    WeightFormat("int4",  4, lowest=-8,   highest=7,   codes="int8",
                 orders={"16-bit": _whole(4, (0, 1, 2, 3), apart=4, offset=8, largest_scale=1024),
                         "e4m3":   _whole(4, (0, 1, 8, 9), apart=2, sign_lowest=True),
                         "int8":   _whole(4, (0, 1, 8, 9), apart=2)}),
    # Zero points of GPTQ checkpoints reach 16: they store one less.
    WeightFormat("uint4", 4, lowest=0,    highest=15,  codes="uint8",         highest_zero=16,
                 orders={"16-bit": _whole(4, (0, 1, 2, 3), apart=4, largest_scale=1024),
                         "e4m3":   _whole(4, (0, 1, 8, 9), apart=2),
                         "int8":   _whole(4, (0, 1, 8, 9), apart=2)}),
    WeightFormat("int8",  8, lowest=-128, highest=127, codes="int8",
                 orders={"16-bit": _whole(8, (0, 1, 4, 5), apart=2, offset=128, largest_scale=127),
                         "int8":   _whole(8, (0, 4, 8, 12), apart=1)}),
    WeightFormat("e4m3",  8, lowest=0,    highest=255, codes="float8_e4m3fn", nans=(0x7F, 0xFF),
                 orders={"16-bit": _whole(8, (0, 2, 4, 6), apart=1, largest_scale=128),
                         "e4m3":   _whole(8, (0, 4, 8, 12), apart=1)}),
    WeightFormat("mxfp4", 4, lowest=0,    highest=15,  codes="uint8",
                 scales=("e8m0",), groups=(32,),
                 orders={"16-bit": replace(_E2M1, largest_scale=2),
                         "e4m3":   WordOrder(((0, 1, 2, 7), (16, 17, 18, 3),
                                              (32, 33, 34, 39), (48, 49, 50, 35)),
                                             apart=(4, 4, 4, 8))}),
    WeightFormat("mxfp8", 8, lowest=0,    highest=255, codes="float8_e4m3fn", nans=(0x7F, 0xFF),
                 scales=("e8m0",), groups=(32,),
                 orders={"16-bit": _whole(8, (0, 2, 4, 6), apart=1, largest_scale=0.5),
                         "e4m3":   _whole(8, (0, 4, 8, 12), apart=1)}),
    # A scale of e4m3 for 16 of k, and one in all, which is here one for each row.
    WeightFormat("nvfp4", 4, lowest=0,    highest=15,  codes="uint8", orders={"16-bit": _E2M1},
                 scales=("e4m3",), groups=(16,), scaled_twice=True),
    WeightFormat("int2",  2, lowest=-2,   highest=1,   codes="int8", orders=_TWO_BITS),
    # -1, 0 and 1 (BitNet b1.58), as int2 has them.
    WeightFormat("ternary", 2, lowest=-1, highest=1,   codes="int8", orders=_TWO_BITS,
                 groups=(None, 128, 64, 32), decoded_as="int2", one_scale=True),
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

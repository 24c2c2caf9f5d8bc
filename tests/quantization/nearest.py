"""The numbers that a format has in a group, and which is nearest: exact, one after the other."""

from __future__ import annotations

from bisect import bisect
from fractions import Fraction
from functools import cache

E2M1 = [Fraction(x) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]

RANGES = {
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int8": (-128, 127),
    "int2": (-2, 1),
    "ternary": (-1, 1),
}


def e4m3(bits: int) -> Fraction:
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if exponent == 0:
        size = Fraction(mantissa, 2**9)
    else:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if bits >> 7 else size


def numbers(format: str, zero: int = 0) -> dict[int, Fraction]:
    """What each code stands for, before its scale; of a float's two zeros the positive one."""
    if format in ("e4m3", "mxfp8"):
        return {bits: e4m3(bits) for bits in range(256) if bits & 127 != 127 and bits != 128}
    if format in ("mxfp4", "nvfp4"):
        return {bits: (-1 if bits & 8 else 1) * E2M1[bits & 7] for bits in range(16) if bits != 8}
    low, high = RANGES[format]
    return {code: Fraction(code - zero) for code in range(low, high + 1)}


@cache
def ordered(format: str, zero: int) -> list[tuple[Fraction, int]]:
    return sorted((value, code) for code, value in numbers(format, zero).items())


def nearest(format: str, number: Fraction, zero: int = 0) -> set[int]:
    """The codes that are nearest to a number: one, or the two that it is half way between."""
    line = ordered(format, zero)
    above = bisect(line, (number, -1))
    around = line[max(0, above - 1) : above + 1]
    least = min(abs(value - number) for value, _ in around)
    return {code for value, code in around if abs(value - number) == least}

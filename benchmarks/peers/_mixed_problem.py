"""Products of a quantised weight: formats, random operands, and how far a right result may be off.

D[m, n] = rows[m] sum over k of A[m, k] W[n, k], with A in bf16, e4m3 or int8. Every contender is
held against float64 from the numbers that it was given itself. A weight times its scale is rounded
to A's type by most kernels, and sums of parts of k to that of D: both errors are random, so the
bound has them relative to the root of the sum of squares, which a lost step of k breaks at any
length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers._checked import Right
from benchmarks.peers._mixed_codes import BITS, Codes, codes_of
from warploom.generator.elements import element
from warploom.generator.families.gemm import Accumulation
from warploom.generator.formats import activations_of
from warploom.quantization import PackedWeight
from warploom.runtime.accumulation import accumulated
from warploom.runtime.contest import Floor
from warploom.runtime.elements import TORCH, unit_roundoff

Shape = tuple[int, int, int]  # m, n, k
ROUNDED = 2.0**-6  # of the root of the sum of squares, and what 8 roundings of bf16 are
SPREAD = 2.0**-7  # of all elements together: 1 in 2**14 of k, left out, makes as much
_ROWS = 1024  # that are computed in float64 at a time
_LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, slots=True)
class Kind:
    """What a cell's weight and activations are in; `group` of k shares a scale, None: a row."""

    format: str
    group: int | None
    activations: str = "bf16"

    @property
    def bits(self) -> int:
        """Bits of an activation."""
        return element(self.activations).bits

    def bytes(self, shape: Shape) -> int:
        """Of the weight with its scales in bf16, of A and of D, each moved once."""
        m, n, k = shape
        scale = {"mxfp4": 1, "mxfp8": 1, "nvfp4": 1, "uint4": 3}.get(
            self.format, 2
        )  # with a zero point
        weight = n * k * BITS[self.format] // 8 + n * (k // (self.group or k)) * scale
        return weight + m * k * self.bits // 8 + 2 * m * n

    def floor(self, shape: Shape) -> Floor:
        """The least time of a product."""
        m, n, k = shape
        return Floor.of(2 * m * n * k, self.bytes(shape), self.bits)


KINDS = {
    "w4a16": Kind("int4", 128),
    "mxfp4": Kind("mxfp4", 32),
    "w8a16": Kind("e4m3", None),
    "w4a8": Kind("int4", 128, "e4m3"),
    "w4a16_zeros": Kind("uint4", 128),
    "nvfp4": Kind("nvfp4", 16),
    "mxfp8": Kind("mxfp8", 32),
    "mxfp8_a8": Kind("mxfp8", 32, "e4m3"),
    "ternary_a8": Kind("ternary", None, "int8"),
    "ternary_a16": Kind("ternary", None),
    "w2a8": Kind("int2", 128, "int8"),
}


class Quantised:
    """A random weight [n, k] of a kind: packed by Warploom, and the numbers that others pack."""

    def __init__(self, kind: Kind, n: int, k: int, device: str, seed: int = 0) -> None:
        draws = torch.Generator(device).manual_seed(n + k + seed)
        drawn = torch.randn(n, k, generator=draws, device=device).mul_(k**-0.5).bfloat16()
        self.kind = kind
        self.packed = packed(drawn, kind)
        self.codes: Codes = codes_of(self.packed)
        self.kept: dict[object, Any] = {}  # what contenders made of it, for all M


@lru_cache(maxsize=1)
def quantised(kind: Kind, n: int, k: int, device: str) -> Quantised:
    """The random weight of these extents: that of the last cell, if it had the same."""
    return Quantised(kind, n, k, device)


def packed(weight: torch.Tensor, kind: Kind) -> PackedWeight:
    """Quantise a weight as users do."""
    quantization: Any = import_module("warploom.quantization")
    found: PackedWeight = quantization.quantize(
        weight, kind.format, group=kind.group, activations=activations_of(kind.activations)
    )
    return found


@dataclass(frozen=True, slots=True)
class Activations:
    """A [m, k]: bf16, or e4m3 or int8 with a scale for each row (fp32 [m]), and in bf16 beside."""

    values: torch.Tensor
    rows: torch.Tensor | None
    wide: torch.Tensor

    @classmethod
    def draw(cls, kind: Kind, m: int, k: int, device: str) -> Activations:
        """Normal numbers, quantised by rows where the kind has 8 bits."""
        draws = torch.Generator(device).manual_seed(m)
        wide = torch.randn(m, k, generator=draws, device=device).bfloat16()
        if kind.activations == "bf16":
            return cls(wide, None, wide)
        values, rows = by_rows(wide, TORCH[kind.activations])
        return cls(values, rows, (values.float() * rows[:, None]).bfloat16())

    def exact(self, *, wide: bool = False) -> torch.Tensor:
        """What they stand for in float64 [m, k]."""
        if wide or self.rows is None:
            return self.wide.double()
        return self.values.double() * self.rows.double()[:, None]


def by_rows(
    values: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """In 8 bits [m, k], with a scale for each row: fp32 [m], in memory of a multiple of four."""
    m, integer = values.shape[0], dtype == torch.int8
    rows = torch.zeros(-(-m // 4) * 4, device=values.device)[:m]
    rows += values.float().abs().amax(1).clamp(min=1e-12) / (127.0 if integer else _LARGEST)
    scaled = values.float() / rows[:, None]
    return (scaled.round() if integer else scaled).to(dtype), rows


# ---- What is right -------------------------------------------------------------------------------


def right(
    a: torch.Tensor,
    w: torch.Tensor,
    multiplied: str,
    accumulation: Accumulation = "promoted",
    out: torch.dtype = torch.bfloat16,
) -> Right:
    """What a w^T is, of a [m, k] and w [n, k] in float64, in elements of which it is computed.

    Sums of fp8 are promoted over 128 of k where group scales are applied to them.
    """
    exact = torch.empty(a.shape[0], w.shape[0], dtype=torch.float64, device=a.device)
    bound = torch.empty_like(exact)
    lost = accumulated(TORCH[multiplied], a.shape[1], accumulation)
    magnitude, square, unit = w.abs(), w.square(), unit_roundoff(out)
    for at in range(0, a.shape[0], _ROWS):
        rows = slice(at, at + _ROWS)
        exact[rows] = a[rows] @ w.t()
        bound[rows] = lost * (a[rows].abs() @ magnitude.t())
        bound[rows] += ROUNDED * (a[rows].square() @ square.t()).sqrt_()
        bound[rows] += unit * (exact[rows].abs() + bound[rows] + torch.finfo(out).tiny)
    fast = multiplied == "e4m3" and accumulation == "fast"
    return Right(exact, bound, SPREAD * (8 if fast else 1))

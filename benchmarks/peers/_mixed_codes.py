"""A quantised weight as plain numbers: what every contender packs in its own way.

W[n, k] = scale[n, k // group] (code[n, k] - zero[n, k // group]). What the numbers stand for is
computed here in float64, apart from the library's own dequantisation: a mistake of its packing or
of its formats shows as an error of its products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.quantization import PackedWeight

BITS = {
    "int4": 4,
    "uint4": 4,
    "mxfp4": 4,
    "e4m3": 8,
    "mxfp8": 8,
    "nvfp4": 4,
    "int2": 2,
    "ternary": 2,
}
OFFSETS = {"int4": 8, "int2": 2, "ternary": 2}  # added to numbers, so that none is negative
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of mxfp4's codes


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [n, k] in a format.

    `codes` are uint8 [n, k]: OFFSETS of the format more than the number, or its bits. `scales` are
    [n, k / group] in bf16, fp16 or fp32, of mxfp4 and mxfp8 uint8: 127 more than the power of two.
    `zeros` are uint8 [n, k / group], or None. Of nvfp4 scales are e4m3, and `global_scale`, fp32
    [], multiplies all.
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    @property
    def n(self) -> int:
        """Rows: the outputs of a layer."""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """Columns: its inputs."""
        return self.codes.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.format]

    @property
    def group(self) -> int:
        """How many of k share a scale; k where a row has one."""
        return self.k // self.scales.shape[1]

    def weight(self) -> torch.Tensor:
        """W [n, k] in float64."""
        grouped = self.numbers().view(self.n, -1, self.group)
        return (grouped * self.factors()[..., None]).view(self.n, self.k)

    def factors(self) -> torch.Tensor:
        """The scales [n, k / group] in float64."""
        if self.format in ("mxfp4", "mxfp8"):
            return torch.exp2(self.scales.double() - 127)
        scales = self.scales.double()
        return scales if self.global_scale is None else scales * self.global_scale.double()

    def numbers(self) -> torch.Tensor:
        """What scales multiply, in float64 [n, k]."""
        if self.format in ("e4m3", "mxfp8"):
            return self.codes.view(torch.float8_e4m3fn).double()
        if self.format in ("mxfp4", "nvfp4"):
            known = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.float64)
            return known.to(self.codes.device)[self.codes.int()]
        if self.zeros is None:
            return self.codes.double() - OFFSETS.get(self.format, 0)
        zeros = self.zeros.double()[..., None]
        return (self.codes.double().view(self.n, -1, self.group) - zeros).view(self.n, self.k)


def codes_of(packed: PackedWeight) -> Codes:
    """The numbers of a packed weight."""
    codes, scales, zeros = packed.unpack()
    name = packed.metadata.format
    if name in OFFSETS:
        codes = (codes.to(torch.int16) + OFFSETS[name]).to(torch.uint8)
    factors = scales.view(torch.uint8) if name in ("mxfp4", "mxfp8") else scales
    whole = packed.global_scale(0, 1)
    whole = None if whole is None else whole.reshape(())
    return Codes(name, codes.view(torch.uint8), factors, zeros, whole)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned numbers [.., count], uint8, as int32 [.., count bits / 32], the first lowest."""
    if bits == 2:
        values = values[..., ::2] | values[..., 1::2] << 2
    if bits <= 4:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values.contiguous().view(torch.int32)


def four_bits(library: str, zeros: torch.Tensor) -> torch.Tensor:
    """Zero points as they are, where a library that keeps them in 4 bits can have them."""
    if int(zeros.max()) > 15:
        raise ValueError(f"{library} keeps zero points in 4 bits: 16 does not fit")
    return zeros

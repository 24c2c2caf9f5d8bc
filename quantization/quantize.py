"""A weight of torch in few bits: a scale for each group, then the codes that are nearest.

Scales are rounded to the type that is stored before codes are computed, so that these are the
nearest for what a kernel will multiply by. All operations are rounded alike on CPUs and GPUs
(divisions by tensors, to nearest even; no logarithm, no power), so both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.formats import Activations, WeightFormat
from warploom.quantization import checks, slabs
from warploom.quantization.codes import stored
from warploom.quantization.metadata import BIAS_OF_E8M0, Metadata, e8m0
from warploom.quantization.packed_weight import PackedWeight

WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = 1.5 * 2**23
_E4M3_LARGEST = 448.0
_E4M3_LEAST = 2.0**-9
_E2M1_LARGEST = 6.0
_E2M1_EXPONENT = 2  # of its largest number, 6
_E4M3_EXPONENT = 8  # of its largest number, 448
# What is half way from the magnitude before e2m1's codes from 1 on, and whether that goes up: to
# the even one.
_E2M1_HALF_WAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_GOES_UP = (0, 1, 0, 1, 0, 1, 0)

# Of groups [rows, groups, k of a group] in fp32: scales and zero points [rows, groups], and codes.
_Quantised = tuple[Tensor, Tensor | None, Tensor]


@torch.no_grad()
def quantize(
    weight: Tensor,
    format: str = "int4",
    group: int | Literal["auto"] | None = "auto",
    symmetric: bool | None = None,
    scale_dtype: torch.dtype | None = None,
    activations: Activations = "16-bit",
) -> PackedWeight:
    """Quantize the weight of a linear layer to 2, 4 or 8 bits, for `warploom.mixed_gemm`.

    Args:
        weight: [N, K], as in torch.nn.Linear: fp32, bf16 or fp16, on any device, with finite
            values.
        format: "int2", "ternary", "int4", "uint4", "int8", "e4m3", "mxfp4", "mxfp8" or "nvfp4".
        group: Values along K that share a scale: 128, 64, 32, or None for one scale for each row.
            "auto" is 128 (mxfp4 and mxfp8: 32; nvfp4: 16; ternary: None).
        symmetric: False stores zero points as well, which only "uint4" has; None: as the format.
        scale_dtype: The dtype of the scales: torch.bfloat16 (the default), torch.float16 or
            torch.float32; mxfp4 and mxfp8 have float8_e8m0fnu, nvfp4 float8_e4m3fn.
        activations: The activations that it will be multiplied by: "16-bit" (fp16, bf16), "e4m3" or
            "int8".

    Returns:
        The quantized weight, on the same device. A scale maps the largest magnitude of its group to
        the largest number of the format; that of ternary weights, whose codes are -1, 0 and 1, is
        the mean magnitude of its group, or of the whole weight without groups (BitNet b1.58).

    Raises:
        ProblemError: For what does not fit, such as a weight that is not finite, a K that the group
            does not divide, or a scale beyond the range of its dtype.

    It needs 10 bytes of memory for each value at a time, at most 80 MB on a CPU and 1.3 GB on a
    GPU.

    Example:
        >>> packed = warploom.quantize(torch.randn(64, 128).bfloat16(), "int4", group=128)
        >>> packed.shape, packed.bits
        ((64, 128), 4.125)
    """
    _require_weight(weight)
    metadata = described(weight.shape, format, group, symmetric, scale_dtype, activations)
    packed = PackedWeight.empty(metadata, weight.device)
    shared = _shared_scale(weight, metadata)
    given = [
        _Checked(metadata, weight, *rows, shared)
        for rows in slabs.row_ranges(metadata, weight.device)
    ]
    for rows in given:
        first, end = rows.first, rows.end
        part = weight[first:end].contiguous().reshape(end - first, metadata.groups, -1)
        scales, zeros, codes = _QUANTISERS[format](part, rows)
        fields = stored(codes.reshape(end - first, metadata.k), metadata.slab)
        twice = shared if metadata.slab.row.scaled_twice else None
        packed.write(first, end, fields, scales, zeros, twice)
    if bool(torch.stack([rows.wrong for rows in given]).any()):  # a GPU is waited for once
        for rows in given:
            rows.refuse_weights()
        for rows in given:
            rows.refuse_scales()
    return packed


class _Checked:
    """What a range of rows is quantised for, and how its faults are named, once all are done."""

    def __init__(
        self, metadata: Metadata, weight: Tensor, first: int, end: int, shared: Tensor | None
    ) -> None:
        self.metadata = metadata
        self.shared = shared  # of all weights, where they have one: see _shared_scale
        self.weight = weight
        self.first = first
        self.end = end

    def scale(self, exact: Tensor, largest: Tensor) -> Tensor:
        """Round scales to their type; what would be 0 is the least number there is.

        Where `largest` is 0, all of the group is, and its scale is 1. Scales of weights that are
        not finite are not either: one look tells both.
        """
        dtype = self.metadata.scale_dtype
        limits = torch.finfo(dtype)
        rounded = exact.to(dtype)
        most, _, _ = checks.largest_scale(self.metadata)
        self.look(~(rounded.abs() <= most), exact)
        least = torch.full((), limits.tiny * limits.eps, dtype=dtype, device=exact.device)
        filled = torch.where(largest == 0, torch.ones_like(least), least)
        return torch.where(rounded == 0, filled, rounded)

    def look(self, excess: Tensor, scales: Tensor) -> None:
        """Keep which scales are too large, or not finite."""
        self.excess, self.scales, self.wrong = excess, scales, excess.any()

    def refuse_weights(self) -> None:
        """Raise for a weight that is not finite.

        For those of all ranges before any scale: one makes the scale that all rows share NaN.
        """
        if bool(self.wrong):
            rows = self.weight[self.first : self.end]
            checks.refuse(~torch.isfinite(rows), rows, "weight", "be finite", self.first)

    def refuse_scales(self) -> None:
        """Raise for the first scale that is too large."""
        if bool(self.wrong):
            _, rule, fix = checks.largest_scale(self.metadata)
            checks.refuse(self.excess, self.scales, "scale", rule, self.first, fix)


def _bounds(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest weight of each group."""
    low, high = torch.aminmax(part, dim=-1)
    return low.float(), high.float()


def _largest(part: Tensor) -> Tensor:
    """Return what is largest in size in each group of 32: first of every fourth, as a GPU takes
    three times as long to reduce neighbours.
    """
    fourths = part.view(*part.shape[:-1], 8, 4)
    found: Tensor = torch.linalg.vector_norm(fourths, math.inf, dim=-2)
    return found.amax(-1)


def _signed(part: Tensor, given: _Checked) -> _Quantised:
    """Code = weight / scale, where what is largest in size has the lowest code: -8, -128 or -2.

    The scale takes its sign. So all codes are used, and only numbers of the other sign that are as
    large are cut off, by one step at most. Error of Gaussian weights in groups of 32, 64, 128 and
    4096, in % of their root mean square, with scales in bf16:
    int4: 8.6, 9.5, 10.3, 13.7; largest / 7: 9.7, 10.8, 11.7, 15.7; / 7.5: 9.5, 10.3, 11.1, 14.7;
    / 8 without the sign: 9.4, 9.9, 10.6, 13.8.
    """
    row = given.metadata.slab.row
    low, high = _bounds(part)
    largest = torch.where(high > -low, high, low)
    scales = given.scale(_divided(largest, row.lowest), largest)
    return scales, None, _whole(part, scales, torch.zeros_like(largest), row)


def _ternary(part: Tensor, given: _Checked) -> _Quantised:
    """Code = weight / scale, rounded to -1, 0 or 1, where the scale is the mean size.

    It is that of a group, or of the whole weight where scales are per channel, as BitNet b1.58
    trains: all rows have the same then.
    """
    sizes = torch.linalg.vector_norm(part, 1, dim=-1, dtype=torch.float64) / part.shape[-1]
    exact = sizes.float() if given.shared is None else given.shared.expand(sizes.shape)
    scales = given.scale(exact, exact)
    return scales, None, _whole(part, scales, torch.zeros_like(exact), given.metadata.slab.row)


def _shared_scale(weight: Tensor, metadata: Metadata) -> Tensor | None:
    """Return what scales of all rows depend on, in fp32 []; None where there is no such thing.

    Of ternary weights with a scale per channel it is the mean size; of nvfp4 the global scale, with
    which the scale of the largest weight is e4m3's largest number.
    """
    if metadata.slab.row.one_scale and metadata.group is None:
        return _mean_size(weight, metadata)
    if not metadata.slab.row.scaled_twice:
        return None
    ranges = slabs.row_ranges(metadata, weight.device)
    largest = torch.stack([weight[a:b].abs().amax().float() for a, b in ranges]).amax()
    exact = _divided(largest, _E2M1_LARGEST * _E4M3_LARGEST)
    return torch.where(exact == 0, 1.0, exact)


def _nvfp4(part: Tensor, given: _Checked) -> _Quantised:
    """Code = weight / scale in e2m1, where a group's scale is e4m3 times the global one.

    What is largest in size in a group is 6 times its scale, but for how that is rounded.
    """
    whole = cast("Tensor", given.shared)
    low, high = _bounds(part)
    largest = torch.maximum(high, -low)
    given.look(~torch.isfinite(largest), largest)
    exact = _divided(largest, _E2M1_LARGEST) / whole
    scales = exact.clamp(_E4M3_LEAST, _E4M3_LARGEST).to(torch.float8_e4m3fn)
    steps = scales.float() * whole
    steps = torch.where(steps == 0, 1.0, steps)  # below all numbers of fp32: codes are 0
    codes = _e2m1(part.float() / -steps[..., None])
    return scales, None, codes


def _mean_size(weight: Tensor, metadata: Metadata) -> Tensor:
    """Return the mean of sizes of all weights, in fp32, range by range: little memory."""
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for first, end in slabs.row_ranges(metadata, weight.device):
        total += torch.linalg.vector_norm(weight[first:end], 1, dtype=torch.float64)
    return (total / weight.numel()).float()


def _unsigned(part: Tensor, given: _Checked) -> _Quantised:
    """Code = weight / scale + zero point: 0 is the least weight (or 0), 15 the largest (or 0)."""
    row = given.metadata.slab.row
    low, high = _bounds(part)
    low, high = low.clamp(max=0), high.clamp(min=0)
    # Divided one by one: the difference may be more than fp32 has.
    exact = _divided(high, row.highest) - _divided(low, row.highest)
    scales = given.scale(exact, high - low)
    zeros = torch.round(-low / scales.float()).clamp_(row.lowest, row.highest)
    return scales, zeros.to(torch.uint8), _whole(part, scales, zeros, row)


def _e4m3(part: Tensor, given: _Checked) -> _Quantised:
    """Code = weight / scale in e4m3, where what is largest in size is 448."""
    low, high = _bounds(part)
    largest = torch.maximum(high, -low)
    scales = given.scale(_divided(largest, _E4M3_LARGEST), largest)
    scaled = part / scales.float()[..., None]
    return scales, None, scaled.clamp_(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)


def _mxfp4(part: Tensor, given: _Checked) -> _Quantised:
    """Code = weight / scale in e2m1, where the scale is a power of two (OCP MX 1.0, section 6.3).

    It is that of what is largest in size, less e2m1's: 2^(floor(log2(largest)) - 2), which leaves
    4 to 8. What is above 6 becomes 6.
    """
    bits, scales = _powers_of_two(part, given, _E2M1_EXPONENT)
    # Dividing is exact, but for what becomes 0 anyway; fp16 has no scales as small.
    dtype = torch.bfloat16 if part.dtype == torch.bfloat16 else torch.float32
    codes = _e2m1(part / -scales.to(dtype)[..., None])
    return bits, None, codes


def _mxfp8(part: Tensor, given: _Checked) -> _Quantised:
    """Code = weight / scale in e4m3, where the scale is a power of two (OCP MX 1.0, section 6.3).

    It leaves 256 to 512 for what is largest in size. What is above 448 becomes 448.
    """
    bits, scales = _powers_of_two(part, given, _E4M3_EXPONENT)
    codes = part.float() / scales[..., None]
    codes = codes.clamp_(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)
    return bits, None, codes


def _powers_of_two(part: Tensor, given: _Checked, above: int) -> tuple[Tensor, Tensor]:
    """Return scales as e8m0 and in fp32: the power of two of the largest weight, less `above`."""
    largest = _largest(part).float()
    exponent = torch.frexp(largest).exponent - 1 - above + BIAS_OF_E8M0
    of_zeros = e8m0(given.metadata.slab.scale_of_zeros)
    bits = torch.where(largest == 0, of_zeros, exponent.clamp(min=0))
    # 2^(bits - 127) in fp32: its exponent, but for 2^-127, which is below the normal numbers.
    scales = torch.where(bits == 0, 1 << 22, bits << 23).to(torch.int32).view(torch.float32)
    most, _, _ = checks.largest_scale(given.metadata)
    given.look(~torch.isfinite(largest) | (bits > e8m0(most)), scales)
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu), scales


def _e2m1(opposite: Tensor) -> Tensor:
    """Return the code that is nearest to each number, given its opposite, bf16 or fp32.

    The bits of floats, as integers, go up with the size of negative numbers, and then with that of
    others: so do the codes of their opposites, of which those from 8 on are negative.
    """
    integers = torch.int16 if opposite.dtype == torch.bfloat16 else torch.int32
    last = torch.tensor(_E2M1_HALF_WAY, dtype=opposite.dtype).view(integers)
    last -= torch.tensor(_E2M1_GOES_UP, dtype=integers)
    lasts = torch.cat((last + torch.iinfo(integers).min, last.new_tensor([-1]), last))
    steps = lasts.to(opposite.device, non_blocking=True)
    return torch.bucketize(opposite.view(integers), steps, out_int32=True).to(torch.uint8)


_QUANTISERS: dict[str, Callable[[Tensor, _Checked], _Quantised]] = {
    "int4": _signed,
    "uint4": _unsigned,
    "int8": _signed,
    "e4m3": _e4m3,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
    "int2": _signed,
    "ternary": _ternary,
}


def _whole(part: Tensor, scales: Tensor, zeros: Tensor, row: WeightFormat) -> Tensor:
    """Return weight / scale + zero point, rounded to whole numbers of the format's range: int8.

    Next to 1.5 * 2^23 numbers of fp32 are whole, and their lower half is that of what was added,
    which is less than twice the range: one pass over memory divides and rounds, and no conversion
    follows.
    """
    beside = (zeros + _WHOLE)[..., None]
    codes = torch.addcdiv(beside, part, scales.float()[..., None])
    lower = codes.view(torch.int16)[..., ::2].clamp(row.lowest, row.highest)
    return lower.view(torch.int8)[..., ::2]


def _divided(values: Tensor, by: float) -> Tensor:
    """Divide by a number, as rounded as by a tensor: GPUs multiply by a plain number's inverse."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def described(
    shape: Sequence[int],
    format: str,
    group: int | Literal["auto"] | None,
    symmetric: bool | None,
    scale_dtype: torch.dtype | None,
    activations: str,
) -> Metadata:
    """Return what `quantize` makes of a weight of this shape; ProblemError where it makes none."""
    row = checks.known(format)
    if len(shape) != 2 or 0 in shape:
        raise ProblemError(f"weight {list(shape)}", rule="must be [N, K], and not empty")
    require_boolean("symmetric", symmetric, optional=True)
    if symmetric is not None and symmetric == row.has_zeros:
        other = "int4 or int8" if row.has_zeros else "uint4"
        raise ProblemError(
            f"symmetric {symmetric} of format {format}",
            rule=f"must be {not symmetric}, or left out",
            fix=f"take format {other}",
        )
    size = row.groups[0] if group == "auto" else group
    scale = row.scales[0] if scale_dtype is None else checks.scale_name(scale_dtype, row)
    return Metadata(format, size, scale, activations, *shape)


def _require_weight(weight: Tensor) -> None:
    checks.require_tensor("weight", weight)
    if weight.dtype not in WEIGHTS:
        raise ProblemError(
            f"weight {weight.dtype}", rule=f"must be one of {checks.listed(WEIGHTS)}"
        )

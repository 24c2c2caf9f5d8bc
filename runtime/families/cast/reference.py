"""The same function in plain torch, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast as cast_type

import torch

from warploom.generator.epilogue import GateFunction
from warploom.generator.families.cast.schedule import COLUMNS, Block
from warploom.runtime.elements import LARGEST
from warploom.runtime.families._product.steps.gate import activated, split
from warploom.runtime.families._product.steps.gate_gradient import of_both
from warploom.runtime.rounding import numbers, rounded

Results = tuple[torch.Tensor | None, ...]
"""q, scale, q_t, scale_t, and where groups of rows end in q_t, if there are some."""

Scales = tuple[torch.Tensor | None, torch.Tensor | None]
"""Given scales of x and of x.T; None where they are computed, or those of x."""

_MOST = torch.finfo(torch.float32).max
_POWER = 0x7F800000  # the bits of fp32's exponent


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of a cast, beside x and given scales; `state` seeds stochastic rounding."""

    dtype: torch.dtype
    block: Block
    transpose: bool = False
    pow2: bool = False
    state: torch.Tensor | None = None


def sizes(block: Block, m: int, n: int) -> tuple[int, int]:
    """The rows and columns that share a scale; of an empty matrix, as if it had one of each."""
    whole = {"tensor": (max(m, 1), max(n, 1)), "row": (1, max(n, 1))}
    blocks = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
    return (whole | blocks)[block]


def _over(number: float, tensor: torch.Tensor) -> torch.Tensor:
    """A number divided by a tensor: `number / tensor` multiplies by a rounded inverse in torch."""
    return torch.full_like(tensor, number) / tensor


def gated(x: torch.Tensor, gate: str | None, gradient: torch.Tensor | None) -> torch.Tensor:
    """What is quantized: x itself, or what a gate makes of it, in its type."""
    if gate is None:
        return x
    function = cast_type("GateFunction", gate)
    if gradient is not None:
        return of_both(gradient.float(), x.float(), function, "halves").to(x.dtype)
    half, up = split(x.float(), "halves")
    return (activated(function, half) * up).to(x.dtype)


def factors(peaks: torch.Tensor, dtype: torch.dtype, *, pow2: bool) -> torch.Tensor:
    """What values are multiplied by, of the largest magnitudes of their blocks, fp32."""
    found = _over(LARGEST[dtype], peaks).clamp(max=_MOST)
    if pow2:
        found = (found.view(torch.int32) & _POWER).view(torch.float32)
    return torch.where((peaks > 0) & (peaks < torch.inf), found, 1.0)


def static_factors(scale: torch.Tensor) -> torch.Tensor:
    """What values are multiplied by, of given scales: 0 of a scale of 0."""
    found = _over(1.0, scale)
    bounded = torch.copysign(torch.where(scale == 0, 0.0, _MOST), scale)
    return torch.where(found.isinf(), bounded, found)


def peaks_of(x: torch.Tensor, block: Block) -> torch.Tensor:
    """The largest magnitude of each block, fp32; NaN wins."""
    (m, n), (down, across) = x.shape, sizes(block, *x.shape)
    padded = torch.nn.functional.pad(x.abs(), (0, -n % across, 0, -m % down))
    tiled = padded.reshape(-(-m // down), down, -(-n // across), across)
    return tiled.amax((1, 3))


def quantized(
    x: torch.Tensor,
    factor: torch.Tensor,
    block: Block,
    dtype: torch.dtype,
    random: torch.Tensor | None,
) -> torch.Tensor:
    """q of fp32 values: the nearest, or one of two by random bits; the largest of what is beyond.

    An infinite value is infinite in e5m2, NaN in e4m3, and the largest in int8; int8's NaN is 0.
    """
    (m, n), (down, across) = x.shape, sizes(block, *x.shape)
    each = factor.repeat_interleave(down, 0)[:m].repeat_interleave(across, 1)[:, :n]
    values = x * each
    if random is not None:
        values = rounded(values, random, dtype)
    if dtype == torch.int8:
        return values.nan_to_num(nan=0.0).clamp(-128, 127).round().to(dtype)
    largest = LARGEST[dtype]
    infinite = torch.where(each < 0, -x, x) if dtype == torch.float8_e5m2 else torch.nan
    return torch.where(x.isinf(), infinite, values.clamp(-largest, largest)).to(dtype)


def cast(x: torch.Tensor, options: Options, scales: Scales) -> Results:
    """q and scales of x [m, n] and of x.T, for given scales [down, across] or computed ones."""
    x, (scale, given_t) = x.float(), scales
    q, own = _cast(x, options, scale, transposed=False)
    if not options.transpose:
        return q, own, None, None
    if options.block not in ("row", "1x128", "1x32"):
        return q, own, q.t(), None
    q_t, scale_t = _cast(x.t(), options, given_t, transposed=True)
    return q, own, q_t, scale_t


def cast_groups(x: torch.Tensor, options: Options, scales: Scales, ends: Sequence[int]) -> Results:
    """q and scales of rows x [m, n], of which the last group has the last, and of x.T, where each
    group has whole blocks of columns, with zeros behind its last row; and where groups end there.
    """
    x, (scale, given_t) = x.float(), scales
    q, own = _cast(x, options, scale, transposed=False)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    tiles = [-(-length // COLUMNS) for length in lengths]
    ends_t = torch.tensor(tiles, dtype=torch.int32).cumsum(0, dtype=torch.int32) * COLUMNS

    def spread(rows: torch.Tensor) -> torch.Tensor:
        parts = [rows[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        pad = torch.nn.functional.pad
        return torch.cat([pad(one, (0, 0, 0, -one.shape[0] % COLUMNS)) for one in parts])

    if options.block == "tensor":
        bytes_t = spread(q.view(torch.uint8)).view(q.dtype)
        return q, own, bytes_t.t(), None, ends_t.to(x.device)
    if given_t is not None:
        given_t = given_t[:, : sum(tiles)]  # of rows one scale each; others are of no group
    q_t, scale_t = _cast(spread(x).t(), options, given_t, transposed=True)
    return q, own, q_t, scale_t, ends_t.to(x.device)


def _cast(
    x: torch.Tensor, options: Options, scale: torch.Tensor | None, *, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    is_mx = options.block == "1x32"
    random, own = None, None
    if options.state is not None:
        random = numbers(options.state, *x.shape, transposed=transposed)
    if scale is None:
        peaks = peaks_of(x, options.block)
        factor = factors(peaks, options.dtype, pow2=options.pow2 or is_mx)
        own = _over(1.0, factor)
    else:
        factor = static_factors(scale)
    if own is not None and is_mx:
        own = (own.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    return quantized(x, factor, options.block, options.dtype, random), own

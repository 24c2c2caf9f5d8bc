"""Quantization: the function that users call."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.cast.call import WRITTEN, CastCall, GroupedCastCall
from warploom.runtime.function import Function
from warploom.runtime.philox import drawn

_cast = Function("cast", CastCall, written=WRITTEN)
_cast_groups = Function("cast_groups", GroupedCastCall, written=WRITTEN)

Pair = tuple[torch.Tensor, torch.Tensor]  # q, scale
Both = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # and of x.T
Grouped = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # and ends


class _Keywords(TypedDict, total=False):
    """What a call may be given beside x, its type and `transpose`, for the overloads."""

    block: str | tuple[int, int]
    scale: torch.Tensor | None
    pow2: bool
    rounding: str
    rounding_state: torch.Tensor | None
    amax: torch.Tensor | None
    scale_layout: str
    gate: str | None
    gradient: torch.Tensor | None
    spec: KernelSpec | str | None
    scale_t: torch.Tensor | None


@overload
def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    transpose: Literal[True],
    offsets: torch.Tensor,
    **keywords: Unpack[_Keywords],
) -> Grouped: ...


@overload
def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    transpose: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Pair: ...


@overload
def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    transpose: Literal[True],
    **keywords: Unpack[_Keywords],
) -> Both: ...


@overload
def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    transpose: bool,
    **keywords: Unpack[_Keywords],
) -> Pair | Both: ...


def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block: str | tuple[int, int] = "tensor",
    transpose: bool = False,
    scale: torch.Tensor | None = None,
    pow2: bool = False,
    rounding: str = "nearest",
    rounding_state: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    scale_layout: str = "column_major",
    gate: str | None = None,
    gradient: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
    scale_t: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> Pair | Both | Grouped:
    """Quantize a matrix to 8 bits: return q and scales with x ~ q * scale, and those of x.T.

    Args:
        x: [.., m, n] or [n], fp16, bf16 or fp32. Leading dimensions are rows. Rows are read in
            place if all of them have one row stride and the last dimension is contiguous; else
            they are copied.
        dtype: Of q: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.
        block: What shares a scale: "tensor", "row", (1, 128), (128, 128), or (1, 32) for mxfp8.
            The last blocks of rows and columns may be short.
        transpose: Return q and scales of x.T [n, m] too, from the same reading of memory; with a
            computed scale of the tensor, or of rows, memory is read twice.
        scale: fp32 scales to use, as this function returns them (static or delayed scaling). A
            scale of 0 gives zeros. None: they are computed.
        scale_t: The same of x.T, as this function returns them: with `scale`, `transpose`, and a
            block of "row" or (1, 128), where x.T has scales of its own.
        pow2: Round computed scales up to powers of two.
        rounding: "nearest", ties to even, or "stochastic": one of the two neighbours, at random,
            with the value as its mean.
        rounding_state: int64 [2] on the device of x, that the random numbers of stochastic rounding
            are a function of: the same state gives the same bits. None: drawn from torch's
            generator.
        amax: An fp32 tensor of one element that is raised to the largest magnitude of x, where
            block is "tensor". NaN wins over every number.
        scale_layout: Of the scales of (1, 128): "column_major", with columns a multiple of 4
            elements apart, as block-scaled GEMMs read them; or "row_major".
        gate: Quantize f(gate) * up of x [.., m, 2n], whose halves are gate and up, in the type of
            x, fp16 or bf16: f is relu, gelu, gelu_tanh or silu. With `transpose`. None: x itself.
        gradient: Of the gate's result, [.., m, n] of x's type: quantize the gradient of gate and up
            [.., m, 2n]. n must be a multiple of 128.
        offsets: int32 [G], on the device of x [m, n]: where groups of rows end, in order, as
            `warploom.grouped_gemm` takes them; the host does not read it. In x.T each group begins
            at a multiple of 128, with zeros behind one that is shorter, so that no block of scales
            has values of two. With `transpose`, and a block of "tensor", "row" or (1, 128). At most
            1,024 groups, of any size, also of none; an offset below the one before it counts as
            that, and one past m as m. Rows past the last offset are neither read nor written.
        spec: The kernel to run, or its name.

    Returns:
        q, of the shape of x, and scale; with `transpose` q_t [n, m] and scale_t as well. Rows of q
        and q_t are a multiple of 16 bytes apart. Scales are fp32, of (1, 32) float8_e8m0fnu: [] of
        a tensor, [.., m, 1] of rows, [.., m, ceil(n / 128)] of (1, 128), [ceil(m / 128),
        ceil(n / 128)] of (128, 128), [.., m, ceil(n / 32)] of (1, 32). Given scales are returned.
        Rows of x.T have scales [n, 1]. With `offsets` also ends, int32 [G]: where groups end in
        q_t, which has as many columns as G groups of m rows may need: at most m + 127 G, rounded
        down to a multiple of 128. Columns past the last end are not written, nor are their scales.

    A computed scale is the inverse of (the largest number of `dtype`: 448, 57344 or 127, divided by
    the largest magnitude of the block), each rounded to fp32; it is 1 where that magnitude is 0,
    infinite or NaN. Finite values that are too large become the largest number. NaN stays NaN, and
    is 0 in int8. Infinity stays infinite in e5m2, is NaN in e4m3, and the largest number in int8.

    Runs on the current stream without waiting. On CPU tensors the reference has the same bits.

    Raises:
        ProblemError: Before anything is launched; also for tensors that require grad, and for
            offsets that are not in order, or exceed m, where they are on the CPU.

    Example:
        >>> q, scale = warploom.cast(torch.randn(16, 256), torch.float8_e4m3fn, block=(1, 128))
        >>> q.shape, scale.shape
        (torch.Size([16, 256]), torch.Size([16, 2]))
        >>> rows, offsets = torch.randn(16, 256), torch.tensor([3, 16], dtype=torch.int32)
        >>> *_, q_t, scale_t, ends = warploom.cast(
        ...     rows, torch.float8_e4m3fn, block=(1, 128), transpose=True, offsets=offsets
        ... )
        >>> q_t.shape, scale_t.shape, ends.tolist()
        (torch.Size([256, 256]), torch.Size([256, 2]), [128, 256])
    """
    if rounding == "stochastic" and rounding_state is None and isinstance(x, torch.Tensor):
        rounding_state = drawn(x.device)
    options = (
        block,
        transpose,
        scale,
        pow2,
        rounding,
        rounding_state,
        amax,
        scale_layout,
        gate,
        gradient,
        spec,
        scale_t,
    )
    ends: torch.Tensor | None = None
    if offsets is None:
        q, computed, q_t, computed_t = _cast(x, dtype, *options)
    else:
        q, computed, q_t, computed_t, ends = _cast_groups(x, dtype, *options, offsets)
    own = scale if computed is None else computed
    assert q is not None and own is not None  # noqa: S101 (for type checkers)
    if q_t is None:
        return q, own
    if scale_t is None:
        scale_t = computed_t
    if scale_t is None:  # that of x, of a tensor or of squares
        scale_t = own.t() if own.dim() == 2 else own
    return (q, own, q_t, scale_t) if ends is None else (q, own, q_t, scale_t, ends)

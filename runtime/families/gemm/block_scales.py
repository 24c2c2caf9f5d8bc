"""Block scales of A and B: which calls have them, and how they lie beside their operands.

`scale_a` and `scale_b` are block scales by their shapes, K/128 being rounded up:

    scale_a [.., M, K/128]                                  one for each 1x128 of A [.., M, K]
    scale_b [.., N/128, K/128], rounded up                  one for each 128x128 of B as [N, K]
    scale_b [.., N, K/128]                                  one for each 1x128 of it

Both have as many dimensions as their operands, and come first among the items of an epilogue. Where
the shapes are also those of vectors (K up to 128, or batches that happen to be as many), they are
vectors. They are fp32 or float8_e8m0fnu, of any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import GATES
from warploom.generator.families._product import Batches
from warploom.generator.families.gemm import (
    SCALE_BLOCK,
    BlockScale,
    BlockScales,
    ScaleStrides,
)
from warploom.generator.step import Reads
from warploom.runtime.elements import BY_DTYPE
from warploom.runtime.families._product.operands import batches, step_pitch
from warploom.runtime.families._product.steps.operand import Extents, natural
from warploom.runtime.families._product.steps.step import Item

TYPES: dict[torch.dtype, BlockScale] = {torch.float32: "fp32", torch.float8_e8m0fnu: "e8m0"}

Pair = tuple[torch.Tensor, torch.Tensor]
HALF = SCALE_BLOCK // 2  # columns of the gate, and of up, that a tile has at most
HALVES = tuple(one.arguments[0] for one in GATES)  # gates of columns that do not take turns


def blocks_of(extent: int) -> int:
    """How many blocks of 128 an extent has, the last of which may be short."""
    return -(-extent // SCALE_BLOCK)


def block_scales(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], *, vectors: bool = True
) -> Pair | None:
    """Return scale_a and scale_b of a call where they are block scales, by their shapes.

    Args:
        a: [.., M, K].
        b: [.., K, N].
        listed: The items of the call, of which the first two may be the scales.
        vectors: Whether scales whose shapes are those of vectors, too, are vectors.
    """
    if len(listed) < 2 or listed[0][0] != "scale_a" or listed[1][0] != "scale_b":
        return None
    scale_a, scale_b = listed[0][1], listed[1][1]
    if not (isinstance(scale_a, torch.Tensor) and isinstance(scale_b, torch.Tensor)):
        return None
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if not (_fits(scale_a, a, (m,), k) and _fits(scale_b, b, (n, blocks_of(n)), k)):
        return None
    if vectors and scale_a.dtype == scale_b.dtype == torch.float32:
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        at = Extents(tuple(lead), m, n)
        reads: tuple[tuple[torch.Tensor, Reads], ...] = ((scale_a, "row"), (scale_b, "column"))
        views = (natural("nothing" if one.numel() == 1 else by, one, at) for one, by in reads)
        if all(view is not None for view in views):
            return None
    return scale_a, scale_b


def _fits(scale: torch.Tensor, operand: torch.Tensor, rows: Sequence[int], k: int) -> bool:
    """Whether the scale has one of these numbers of rows, and the dimensions of its operand."""
    shape = scale.shape
    if len(shape) != operand.dim() or shape[-1] != blocks_of(k) or shape[-2] not in rows:
        return False
    pairs = zip(shape[:-2], operand.shape[:-2], strict=True)
    return all(count in (1, extent) for count, extent in pairs)


@dataclass(frozen=True, slots=True)
class BoundScales:
    """The block scales of a checked call.

    scaling   what each scale is of
    a, b      the element types
    strides   how those of A and of B lie, where D's batches are rows of one matrix or batches
    """

    scaling: BlockScales
    a: BlockScale
    b: BlockScale
    strides: tuple[ScaleStrides, ScaleStrides]


NONE = BoundScales("none", "fp32", "fp32", (ScaleStrides(), ScaleStrides()))


def check(pair: Pair, a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]) -> None:
    """Raise ProblemError for block scales that kernels cannot multiply these operands by.

    `listed` are the items of the epilogue.
    """
    for name, operand in (("a", a), ("b", b)):
        if not BY_DTYPE[operand.dtype].is_fp8:
            raise ProblemError(
                f"block scales of {name} of {operand.dtype}",
                rule="must be of fp8 operands",
                fix="quantize to torch.float8_e4m3fn, or pass one scale for each row",
            )
    for name, scale in zip(("scale_a", "scale_b"), pair, strict=True):
        if scale.dtype not in TYPES:
            raise ProblemError(
                f"{name} of {scale.dtype}",
                rule="block scales must be fp32 or float8_e8m0fnu",
                fix="use .float()",
            )
        if scale.get_device() != a.get_device():
            raise ProblemError(
                f"{name} on {scale.device}",
                rule="must be on the device of a and b",
                fix="move it there",
            )
    n = b.shape[-1]
    if n % (2 * HALF) and any(item[0] in HALVES for item in listed):
        raise ProblemError(
            f"gate of {n} columns with block scales",
            rule=f"gate and up must have a multiple of {HALF} columns each, so that what a tile "
            "has of either shares a scale",
            fix="pad the weight, or multiply the halves of the result",
        )


def in_rows(scale_a: torch.Tensor, lead: Sequence[int]) -> bool:
    """Whether A's scales are rows one stride apart where A's batches are rows of one matrix."""
    return not lead or _row_stride(scale_a, lead) is not None


def bind(
    pair: Pair, b: torch.Tensor, lead: Sequence[int], shared: tuple[int, ...] | None
) -> BoundScales:
    """Return how checked block scales lie.

    Args:
        pair: scale_a and scale_b.
        b: [.., K, N].
        lead: The batches of D.
        shared: The same, or None where they are rows of one matrix.
    """
    scale_a, scale_b = pair
    n = b.shape[-1]
    row_a = _stride(scale_a, -2)
    if shared is None and lead:
        row_a = _row_stride(scale_a, lead) or 0
    places = []
    for name, scale, row in (
        ("scale_a", scale_a, row_a),
        ("scale_b", scale_b, _stride(scale_b, -2)),
    ):
        own = Batches() if shared is None else batches(scale, shared)
        if own is None:
            raise ProblemError(
                f"{name} of shape {list(scale.shape)} with strides {list(scale.stride())}",
                rule="must have its batches one stride apart",
                fix="use .contiguous()",
            )
        places.append(ScaleStrides(row, _stride(scale, -1), own))
    scaling: BlockScales = "row_block" if scale_b.shape[-2] == blocks_of(n) else "row_row"
    return BoundScales(scaling, TYPES[scale_a.dtype], TYPES[scale_b.dtype], (places[0], places[1]))


def _row_stride(scale: torch.Tensor, lead: Sequence[int]) -> int | None:
    """Elements from row to row where all batches of D are rows of one matrix, or None."""
    spread = scale.expand(*lead, *scale.shape[-2:])
    return step_pitch(spread, spread.shape[:-1], trailing=1)


def _stride(scale: torch.Tensor, dimension: int) -> int:
    return scale.stride(dimension) if scale.shape[dimension] > 1 else 0


def refuse_partner(a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]) -> None:
    """Raise ProblemError where a scale has the shape of block scales in a call that has none.

    Scales whose shapes are those of vectors, too, are vectors.
    """
    if not BY_DTYPE[a.dtype].is_fp8:
        return
    (m, k), n = a.shape[-2:], b.shape[-1]
    if k <= SCALE_BLOCK:
        return
    for name, operand, rows in (("scale_a", a, (m,)), ("scale_b", b, (blocks_of(n), n))):
        scale = next((item[1] for item in listed if item[0] == name), None)
        if not isinstance(scale, torch.Tensor) or not _fits(scale, operand, rows, k):
            continue
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        reads: Reads = "row" if name == "scale_a" else "column"
        if scale.numel() == 1 or natural(reads, scale, Extents(tuple(lead), m, n)) is not None:
            continue
        shapes = [m, blocks_of(k)], [blocks_of(n), blocks_of(k)], [n, blocks_of(k)]
        raise ProblemError(
            f"{name} of shape {list(scale.shape)}, which is that of block scales",
            rule=f"block scales come as scale_a {shapes[0]} with scale_b {shapes[1]} or "
            f"{shapes[2]}, with the batches of their operands before these, and first in an "
            "epilogue",
            fix=f"pass both so, or {name} as one number for each "
            f"{'row' if name == 'scale_a' else 'column'} of D",
        )


def without_gradients() -> ProblemError:
    """The error of a call of block-scaled operands of which a gradient is wanted."""
    return ProblemError(
        "block scales with a tensor that requires grad",
        rule="calls with block scales are not differentiated",
        fix="call under torch.no_grad(), or in the forward of a torch.autograd.Function",
    )


def dequantised(operand: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp8 rows [.., R, K] times their block scales, in `dtype`."""
    rows, k = operand.shape[-2:]
    wide = scale.to(torch.float32).to(dtype)
    each = 1 if scale.shape[-2] == rows else SCALE_BLOCK
    spread = wide.repeat_interleave(each, -2)[..., :rows, :]
    return operand.to(dtype) * spread.repeat_interleave(SCALE_BLOCK, -1)[..., :k]

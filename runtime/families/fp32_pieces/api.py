"""Pieces of fp32 matrices: the function that users call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.fp32_pieces.call import Fp32PiecesCall
from warploom.runtime.function import Function

_pieces = Function("fp32_pieces", Fp32PiecesCall)


def fp32_pieces(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float16,
    count: int = 2,
    *,
    spec: KernelSpec | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split an fp32 matrix into 16-bit pieces, side by side along k: what fp32 GEMMs multiply.

    `warploom.gemm(a, b, precision=...)` calls it for both operands.

    Args:
        x: [.., m, k], fp32: A itself, or B as [.., n, k]. It is read where it is stored if one
            stride leads through all rows and the last dimension is contiguous, or if it is a
            matrix whose first dimension is contiguous; else it is copied.
        dtype: Of the pieces. torch.float16: each row is first multiplied by a power of two, which
            brings its largest finite magnitude to [2^14, 2^15). torch.bfloat16: x itself is split.
        count: Pieces of each value: 2, or 3 of bf16.
        spec: The kernel to run, or its name.

    Returns:
        q [.., m, count * k'], k' being k rounded up to a multiple of 64 with zeros between: the
        rounded values, then what is left of them, rounded. And scale [3, .., m], fp32, of fp16
        pieces, else None: x is about the sum of its pieces times the first two, or times the third.
        Values that are not finite have a first piece alone, and no say in scales.

    Raises:
        ProblemError: Before anything is launched; also for tensors that require grad.

    Example:
        >>> x = torch.randn(128, 256)
        >>> q, scale = warploom.fp32_pieces(x)
        >>> high, low = q.view(128, 2, 256).float().unbind(1)
        >>> torch.allclose((high + low) * scale[2, :, None], x)
        True
    """
    q, scale, _ = _pieces(x, dtype, count, spec, None, None, None)
    assert q is not None  # noqa: S101 (for type checkers)
    return q, scale


class Pieces(NamedTuple):
    """Pieces of a matrix, and of fp16 ones the scales of its rows and what these span."""

    q: torch.Tensor
    scale: torch.Tensor | None
    span: torch.Tensor | None


def split(x: torch.Tensor, dtype: torch.dtype, count: int) -> Pieces:
    """Return what `fp32_pieces` does, and what the rows of x span."""
    q, scale, span = _pieces(x, dtype, count, None, None, None, None)
    assert q is not None  # noqa: S101 (for type checkers)
    return Pieces(q, scale, span)

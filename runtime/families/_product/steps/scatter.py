"""Rows of the result that are written to rows of D which a vector of indices names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import Scatter
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Item, TorchStep
from warploom.runtime.tensors import shown

_TYPES = {torch.int32: "int32", torch.int64: "int64"}


def index_of(listed: Sequence[Item]) -> torch.Tensor | None:
    """The indices of an epilogue whose last item scatters rows; None of any other."""
    last = listed[-1] if listed else None
    if not isinstance(last, tuple | list) or len(last) != 2 or last[0] != "scatter":
        return None
    return cast("torch.Tensor", last[1])


def refuse_batches(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise ProblemError for a or b that is no matrix: indices are of rows of one."""
    if a.dim() != 2 or b.dim() != 2:
        raise ProblemError(
            f"scatter with a {list(a.shape)} by b {list(b.shape)}",
            rule="must be of rows of one matrix, a [M, K] by b [K, N]",
            fix="pass a.flatten(0, -2) where b is one matrix, or use warploom.grouped_gemm",
        )


def check_index(index: object, rows: int, device: int) -> torch.Tensor:
    """Return the index of each of so many rows.

    Raises ProblemError for what is none, naming the rule and the fix; its contents are not read.
    """
    if not isinstance(index, torch.Tensor):
        raise ProblemError(
            f"scatter {shown(index)}", rule="must be a tensor", fix="pass a torch tensor"
        )
    if index.dtype not in _TYPES or index.dim() != 1 or index.shape[0] != rows:
        raise ProblemError(
            f"scatter {list(index.shape)} of {index.dtype}",
            rule=f"must be int32 or int64 [{rows}]: the row of the result for each row of a",
            fix="use index.flatten().int(), with -1 for rows that are not to be written",
        )
    if index.get_device() != device:
        raise ProblemError(
            f"scatter on {index.device}",
            rule="must be on the device of a",
            fix="use index.to(a.device)",
        )
    if rows > 1 and index.stride(0) != 1:
        raise ProblemError(
            f"scatter {list(index.shape)} with stride {index.stride(0)}",
            rule="must have its indices next to each other",
            fix="use index.contiguous()",
        )
    return index


def written(into: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `into` [R, n] with row i of x [m, n] at row index[i], for indices that are its rows.

    The host reads no index: rows that are written nowhere go to a row more, which is left out.
    """
    rows, kind = into.shape[0], into.dtype
    at = torch.where((index >= 0) & (index < rows), index, rows).long()
    if kind.itemsize == 1:  # torch copies no rows of 8-bit floats by index
        into, x = into.view(torch.uint8), x.view(torch.uint8)
    room = torch.cat((into, into.new_zeros(1, into.shape[1]))).index_copy(0, at, x)[:rows]
    return room if room.dtype == kind else room.view(kind)


def scattered(d: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of d by their indices, for autograd; those that no index names are zeros.

    Raises ProblemError for results in 8 bits, of which autograd has no gradient here.
    """
    if d.dtype.itemsize == 1:
        raise ProblemError(
            f"out_dtype {d.dtype} with scatter and a tensor that requires grad",
            rule="must be of 16 bits or more",
            fix="leave it out and convert the result, or call under torch.no_grad()",
        )
    return written(torch.zeros_like(d), d, index)


class TorchScatter(TorchStep[Scatter]):
    """Row i goes to row index[i]; rows of the result that no index names are zeros here."""

    step = Scatter
    example = '("scatter", index)'
    no_gradient = "its gradient is that of rows in another order"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Scatter, torch.Tensor]:
        index = check_index(item[1], at.m, device)
        return Scatter(_TYPES[index.dtype]), index  # type: ignore[arg-type]

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return written(torch.zeros_like(x), x, item[1])

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return self.apply(error, item)

    def sample(self, step: Scatter, draws: Draws, at: Extents) -> Item:
        dtype = torch.int32 if step.index == "int32" else torch.int64
        order = torch.randperm(at.m, generator=draws.random, device=draws.device)
        return ("scatter", order.to(dtype))

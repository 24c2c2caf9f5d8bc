"""Tokens sorted by expert: the function that users call."""

from __future__ import annotations

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.route.call import RouteCall
from warploom.runtime.function import Function

_route = Function("route", RouteCall)


def route(
    ids: torch.Tensor,
    experts: int,
    *,
    first_expert: int | None = None,
    spec: KernelSpec | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the pairs of a token and an expert by expert, as grouped GEMMs read their rows.

    One launch, whose grid does not depend on contents: a CUDA graph serves every routing.

    Args:
        ids: The experts that each token chose, int64 or int32 [tokens, k], of any strides.
        experts: How many experts there are here, 1 to 1024.
        first_expert: The id of the first of them, where ranks have some of the experts each: all
            ids but those of these are skipped. None: it is 0, and ids outside of -1 to experts - 1
            are refused on the CPU, and skipped on a GPU, whose contents the host does not read.
        spec: The kernel to run, or its name.

    Returns:
        offsets: int32 [experts], where the rows of each expert end, as `grouped_gemm` takes them.
        order: int32 [tokens * k], the pair (token * k + choice) that each row is of. Rows of an
            expert are in the order of their pairs, in every run.
        inverse: int32 [tokens, k], the row of each pair.

        Ids that are skipped, as -1 always is, have no row: their inverse is -1, and their pairs are
        the last of `order`, behind the end of the last expert's rows.

    Raises:
        ProblemError: Before anything is launched; for ids that are no expert's where they are on
            the CPU.

    Example:
        >>> offsets, order, inverse = warploom.route(torch.tensor([[1, 0], [1, 2]]), 3)
        >>> offsets.tolist(), order.tolist(), inverse.tolist()
        ([1, 3, 4], [1, 0, 2, 3], [[1, 0], [2, 3]])
    """
    return _route(ids, experts, first_expert, spec)

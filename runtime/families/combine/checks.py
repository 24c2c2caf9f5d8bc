"""What the tensors of calls must be, whatever their contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.generator.families.combine.schedule import VALUES
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families.combine.call import PermuteCall

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check(
    name: str, values: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None
) -> None:
    """Raise ProblemError for rows or tokens, called `name`, that do not fit the others."""
    for what, one in ((name, values), ("weights", weights)):
        if one is not None and one.dtype not in FLOATS:
            raise ProblemError(
                f"{what} of {shown(one.dtype)}",
                rule="must be float16, bfloat16 or float32",
                fix="convert it",
            )
    if values.dim() != 2 or values.shape[1] % VALUES:
        raise ProblemError(
            f"{name} {list(values.shape)}",
            rule=f"must have two dimensions, the last a multiple of {VALUES}",
            fix="flatten leading dimensions, and pad the last",
        )
    if inverse.dtype != torch.int32 or inverse.dim() != 2:
        raise ProblemError(
            f"inverse {list(inverse.shape)} of {shown(inverse.dtype)}",
            rule="must be int32 [tokens, k], the row of each pair",
            fix="take it from warploom.route",
        )
    if weights is not None and weights.shape != inverse.shape:
        raise ProblemError(
            f"weights {list(weights.shape)}, inverse {list(inverse.shape)}",
            rule=f"weights must be {list(inverse.shape)}: nothing is broadcast",
            fix="expand weights",
        )


def check_tokens(call: PermuteCall) -> None:
    """Raise ProblemError for tensors of `permute` that do not fit its tokens."""
    hidden, inverse, combined = call.hidden, call.inverse, call.combined
    if inverse.shape[0] != hidden.shape[0]:
        raise ProblemError(
            f"inverse {list(inverse.shape)}, hidden {list(hidden.shape)}",
            rule=f"inverse must have {hidden.shape[0]} tokens",
            fix="route the tokens that hidden has",
        )
    if combined is not None and (
        call.weights is None
        or combined.dtype != hidden.dtype
        or combined.shape != (call.row_count, hidden.shape[1])
    ):
        raise ProblemError(
            f"combined {list(combined.shape)} of {shown(combined.dtype)}",
            rule=f"must be {shown(hidden.dtype)} {[call.row_count, hidden.shape[1]]}, with weights",
            fix="pass the rows that were combined",
        )
    if call.offsets is not None:
        check_offsets(call.offsets)


def check_offsets(offsets: torch.Tensor) -> None:
    """Raise ProblemError for offsets that are not those of experts."""
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or not offsets.numel():
        raise ProblemError(
            f"offsets {list(offsets.shape)} of {shown(offsets.dtype)}",
            rule="must be int32 [experts], where the rows of each expert end",
            fix="take them from warploom.route",
        )

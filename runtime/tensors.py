"""What the tensors of a call must be before anything reads them.

Warm calls ask none of this but whether a level of forward-mode differentiation is open.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError


def refuse_dual(function: str, values: Iterable[object]) -> None:
    """Raise ProblemError for a tensor with a tangent, which a kernel would drop.

    To be asked where forward_ad._current_level >= 0 only, as everywhere else there is none.
    """
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise ProblemError(
                f"a dual tensor of shape {list(value.shape)}",
                rule=f"{function} has no forward-mode derivative",
                fix="pass forward_ad.unpack_dual(tensor).primal, or use plain torch operations",
            )

"""How far a packed weight is from the weight that it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization import checks, slabs
from warploom.quantization.dequantize import rows

if TYPE_CHECKING:
    from warploom.quantization.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What was lost. Relative errors are root mean squares over those of the weight.

    `relative` is of the whole weight, `worst_relative` of row `worst_row`, where it is largest;
    `largest` is the largest difference of one element; `bits` those that each weight takes.
    """

    relative: float
    largest: float
    worst_row: int
    worst_relative: float
    bits: float

    def __str__(self) -> str:
        return (
            f"error {self.relative:.3%} of the weight (row {self.worst_row}: "
            f"{self.worst_relative:.3%}), at most {self.largest:.3g}, in {self.bits:.3f} bits"
        )


@torch.no_grad()
def report(weight: PackedWeight, original: Tensor) -> ErrorReport:
    """Compare with `original` [N, K], in float64, on the device of both."""
    checks.require_tensor("weight", original)
    if tuple(original.shape) != weight.shape:
        raise ProblemError(
            f"weight {list(original.shape)}", rule=f"must be {list(weight.shape)}, as {weight}"
        )
    if original.device != weight.device:
        raise ProblemError(
            f"weight on {original.device}", rule=f"must be on {weight.device}, as {weight}"
        )
    errors, sizes, largest = [], [], []
    for first, end in slabs.row_ranges(weight.metadata):
        exact = original[first:end].double()
        difference = rows(weight, first, end, torch.float64) - exact
        errors.append(difference.square().sum(-1))
        sizes.append(exact.square().sum(-1))
        largest.append(difference.abs().amax())
    error, size = torch.cat(errors), torch.cat(sizes)
    # A row of zeros has no error, or one that is infinitely many times what is there.
    relative = torch.where(error == 0, torch.zeros_like(error), error / size).sqrt()
    worst = int(relative.argmax())
    whole = error.sum() / size.sum() if bool(error.any()) else error.sum()
    return ErrorReport(
        relative=float(whole.sqrt()),
        largest=float(torch.stack(largest).amax()),
        worst_row=worst,
        worst_relative=float(relative[worst]),
        bits=weight.bits,
    )

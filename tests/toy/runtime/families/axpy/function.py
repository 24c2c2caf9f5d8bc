"""The function that users call."""

from __future__ import annotations

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import named
from warploom.runtime.families.axpy.call import AxpyCall
from warploom.runtime.plan import run


def axpy(
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float = 1.0,
    *,
    relu: bool = False,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Return alpha x + y, of tensors of one shape and type; with `relu`, nothing below 0."""
    return run(AxpyCall(x, y, alpha, relu, out, named(spec)))

"""GEMMs of fp32 matrices by TF32: 10 bits of each value, which TMA rounds while it loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from warploom.runtime.arguments import declared
from warploom.runtime.families.gemm import reference
from warploom.runtime.families.gemm.call import GemmCall

_DROPPED = 13  # bits of an fp32 value that TF32 does not have


@declared
class Tf32Call(GemmCall):
    """A call on fp32 matrices whose products are of TF32.

    Kernels read them along k, as they do 8-bit operands: others are copied to that layout first.
    """

    inputs: ClassVar[Mapping[str, Any]] = {"fp32": "tf32"}

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """D by plain torch operations, of rounded operands."""
        return reference.gemm(rounded_to_tf32(self.a), rounded_to_tf32(self.b), self.listed, dtype)


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """The nearest values of TF32, those halfway to even ones; what is not finite is kept."""
    x = x.resolve_neg()
    bits = x.view(torch.int32)
    nearest = bits + (1 << (_DROPPED - 1)) - 1 + (bits >> _DROPPED & 1)
    return torch.where(x.isfinite(), (nearest >> _DROPPED << _DROPPED).view(torch.float32), x)

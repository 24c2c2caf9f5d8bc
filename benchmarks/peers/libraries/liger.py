"""Liger's elementwise kernel of gated layers."""

from __future__ import annotations

import torch

from benchmarks.peers.libraries import imported


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of x [m, 2 i], whose halves are gate and up."""
    gate, up = x.chunk(2, dim=-1)
    swiglu = imported("liger", "liger_kernel.ops.swiglu")
    result: torch.Tensor = swiglu.LigerSiLUMulFunction.apply(gate, up)
    return result

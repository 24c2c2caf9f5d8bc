"""Which products of `warploom.nn.QuantizedLinear` Warploom computes; torch computes the others.

As linear_rules.py: calls and `warploom.explain` ask the same predicate, which reads no contents.
"""

from __future__ import annotations

import torch

from warploom.integrations.devices import unserved
from warploom.integrations.linear_rules import (
    EXTENT,
    PRODUCTS,
    extents,
    product_type,
    transformed,
)
from warploom.quantization import PackedWeight


def refusal(
    x: torch.Tensor,
    weight: PackedWeight,
    residual: torch.Tensor | None = None,
    *,
    named: bool = False,
) -> str | None:
    """Why torch computes x [.., k] times a packed weight [n, k], given back in 16 bits, if it does.

    Of a GPU that is `named` kernels exist, and the tensors may be anywhere.
    """
    found = None if named else unserved(x.get_device())
    if found is not None:
        return found
    kind = x.dtype
    if torch._C._is_any_autocast_enabled():
        kind = product_type(kind, "cuda" if named else x.device.type)
    if kind not in PRODUCTS:
        return f"x is {kind}; kernels take bfloat16 and float16"
    # An exported program is for any number of rows: a bound would be one of its dimensions.
    if not torch.compiler.is_exporting() and not 0 < x.numel() <= EXTENT:
        found = extents(x, weight.shape)
        if found is not None:
            return found
    if residual is not None and residual.dtype not in (*PRODUCTS, torch.float32):
        return f"the residual is {residual.dtype}; kernels add bfloat16, float16 and float32"
    return transformed(x, weight.data, sharded=False)

"""Which linear layers' products Warploom computes; torch's own kernels compute the others.

`refusal` is what calls and `warploom.explain` both ask, so that they cannot disagree. It reads
shapes, types and flags, never contents, and returns None, or why a call is torch's as a phrase that
reads on from "because". Every call asks it, so what is common is seen first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.shapes import LARGEST
from warploom.integrations.devices import unserved
from warploom.integrations.frozen import FrozenParameter
from warploom.integrations.transforms import foreign, transforming
from warploom.runtime.operator import is_distributed

PRODUCTS = (torch.bfloat16, torch.float16)  # types of products in which a model trains
EXTENT = LARGEST - (1 << 16)  # of a kernel's counters, less what the largest cluster of tiles adds
# Kernels read addresses: these types have some, or operators see the call in their place.
_PLAIN = {torch.Tensor, torch.nn.Parameter, FrozenParameter, FakeTensor, FunctionalTensor}


def refusal(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    named: bool = False,
) -> str | None:
    """Why torch computes x [.., k] times weight [n, k], if it does.

    Of a GPU that is `named` kernels exist, and the tensors may be anywhere.
    """
    found = None if named else unserved(x.get_device())
    if found is not None:
        return found
    kind, own = x.dtype, weight.dtype
    if torch._C._is_any_autocast_enabled():
        device = "cuda" if named else x.device.type
        kind, own = product_type(kind, device), product_type(own, device)
    if kind != own or kind not in PRODUCTS:
        return f"x is {kind} and the weight {own}; kernels take bfloat16 and float16, both one type"
    if not 0 < x.numel() <= EXTENT or not weight.numel():
        return extents(x, weight.shape) or transformed(x, weight)
    if residual is not None and residual.dtype not in (*PRODUCTS, torch.float32):
        return f"the residual is {residual.dtype}; kernels add bfloat16, float16 and float32"
    return transformed(x, weight)


def product_type(dtype: torch.dtype, device: str) -> torch.dtype:
    """The type that torch's autocast, where it is on, gives an operand of a product."""
    eligible = dtype in (*PRODUCTS, torch.float32) and device in ("cuda", "cpu")
    return (
        torch.get_autocast_dtype(device)
        if eligible and torch.is_autocast_enabled(device)
        else dtype
    )


def sum_type(input: torch.Tensor, residual: torch.Tensor) -> torch.dtype:
    """The type that torch gives the sum of a product and a residual."""
    return torch.promote_types(product_type(input.dtype, input.device.type), residual.dtype)


def check_residual(input: torch.Tensor, residual: torch.Tensor, out_features: int) -> None:
    """Raise ProblemError for a residual that torch would broadcast, or could not add."""
    if residual.shape != (*input.shape[:-1], out_features):
        raise ProblemError(
            f"residual {list(residual.shape)} with input {list(input.shape)}",
            rule=f"must have the shape of the result, [.., {out_features}]",
            fix="expand it to that shape, or add it to the result",
        )


def extents(x: torch.Tensor, shape: Sequence[int]) -> str | None:
    """Why no kernel takes an x of this many rows, or none, and a weight of this shape, if so."""
    if not x.numel() or 0 in shape:
        return f"x {list(x.shape)} by a weight {list(shape)} has nothing to multiply"
    rows = x.numel() // x.shape[-1]
    if max(rows, *shape) > EXTENT:
        return f"{rows} rows are more than kernels count to"
    return None


def transformed(x: torch.Tensor, weight: torch.Tensor, *, sharded: bool = True) -> str | None:
    """Why torch takes tensors that are more than memory, or calls that it transforms.

    Where there are rules for `sharded` tensors, torch's distributed ones are no reason.
    """
    found = foreign((x, weight), _taken if sharded else _plain) or transforming()
    if found is None and forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    return found


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN


def _taken(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN or is_distributed(tensor)

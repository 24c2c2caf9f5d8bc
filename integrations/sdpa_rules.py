"""Which scaled dot product attentions Warploom computes; torch's own kernels compute the others.

The predicates read shapes, strides, types and numbers, never contents. Each returns None, or why a
call is torch's as a phrase that reads on from "because".
"""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from warploom.generator.families._attention import DIMS, GRADIENT_DIMS
from warploom.integrations import dropout_rules, sdpa_mask
from warploom.integrations.devices import unserved
from warploom.integrations.transforms import foreign, transforming
from warploom.runtime.kinds import Kinds
from warploom.runtime.tensors import launchable

_ELEMENTS = (torch.float16, torch.bfloat16)
_NAMES = ("query", "key", "value")
_UNIT = 8  # elements in TMA's 16 bytes
_UNIT_BYTES = 16
_OR_PAIRS = "".join(f", or {dim} with {dim_v} of value" for dim, dim_v in GRADIENT_DIMS)
_BOUND = 4096  # kinds of calls remembered
_verdicts: Kinds[str] = Kinds(_BOUND)  # on all but addresses; "" where kernels compute
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Why torch computes a call of `warploom.sdpa` on the GPU of its tensors, if it does."""
    given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return refusal_anywhere(*given) or elsewhere(query)


def refusal_anywhere(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Why torch computes a call of `warploom.sdpa` on any GPU, if it does."""
    found = not_computed(is_causal, scale) or misfit(query, key, value, enable_gqa)
    if found is None and attn_mask is not None:
        found = sdpa_mask.misfit(attn_mask, query, key, is_causal=is_causal)
        found = found or transformed((attn_mask,))
    if found is None and dropout_p != 0.0:
        return dropout_rules.refusal(dropout_p, (attn_mask,))
    return found


def not_computed(is_causal: bool, scale: float | None) -> str | None:
    """Why torch computes what these arguments ask for, on tensors of any shape."""
    if type(is_causal) is not bool:
        return f"is_causal is a {type(is_causal).__name__}"
    if scale is not None and not isinstance(scale, float | int):
        return f"scale is a {type(scale).__name__}"
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        return f"Warploom's kernels take a positive scale: it is {scale}"
    return None


def misfit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> str | None:
    """Why torch computes an attention of tensors of these classes, types, strides and addresses."""
    if type(enable_gqa) is not bool:
        return f"enable_gqa is a {type(enable_gqa).__name__}"
    given, shared = (query, key, value), enable_gqa
    # Where calls are traced, tensors have no addresses, and sizes may be symbols.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return transformed(given) or _unlike(*given, shared)
    found = _verdicts.find(shared, *given)
    if found is None:
        found = transformed(given) or _unlike(*given, shared) or _negated(*given) or ""
        if launchable(*given):
            _verdicts.keep(found, shared, *given)
    return found or _unaligned(*given)


def _unlike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> str | None:
    """The same, wherever they are."""
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _ELEMENTS:
        return f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: not fp16 or bf16"
    if not query.device == key.device == value.device:
        return "query, key and value are on several devices"
    return _shapes(query, key, value, enable_gqa) or _unreadable(query, key, value)


def _shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> str | None:
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) or len(q) < 3:
        return f"query has {len(q)} dimensions, key {len(k)}, value {len(v)}: not as many, or not 3"
    if (
        q[-1] != k[-1]
        or (q[-1] % _UNIT or v[-1] % _UNIT)
        or not 0 < q[-1] <= DIMS[-1]
        or not are_together(q[-1], v[-1])
    ):
        return (
            f"the head dimensions are {q[-1]}, {k[-1]} and {v[-1]}: "
            f"not one multiple of {_UNIT} up to {DIMS[-1]}{_OR_PAIRS}"
        )
    if k[:-1] != v[:-1] or q[:-3] != k[:-3]:
        return "query, key and value differ in batches, or key and value in heads or length"
    if 0 in q or 0 in k:
        return "there is nothing to compute"
    heads, kv_heads = q[-3], k[-3]
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        return f"{heads} heads of query do not share {kv_heads} of key (enable_gqa={enable_gqa})"
    return None


def are_together(dim: int, dim_v: int) -> bool:
    """Whether kernels of both passes take q and k of one head dimension and v of the other."""
    if dim_v == dim:
        return True
    return 0 < dim_v < dim and any(dim <= one and dim_v <= other for one, other in GRADIENT_DIMS)


def of_two_dims(query: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why torch's own operators keep an attention whose value has another head dimension."""
    if query.shape[-1] == value.shape[-1]:
        return None
    return "the results of torch's operator are laid out for one head dimension"


def _unreadable(*tensors: torch.Tensor) -> str | None:
    """Why kernels would read copies of tensors that lie so; torch reads some where they are."""
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if not _fit(tensor.shape, tensor.stride()):
            return _copied(name, tensor)
    return None


def _negated(*tensors: torch.Tensor) -> str | None:
    """The same of tensors that torch has negated lazily, which compilers do not trace."""
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor.is_neg():
            return f"{name}, which torch has negated lazily, would have to be copied"
    return None


def _unaligned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """The same of tensors of 16 bits at their addresses."""
    if not (query.data_ptr() | key.data_ptr() | value.data_ptr()) % _UNIT_BYTES:
        return None
    for name, tensor in zip(_NAMES, (query, key, value), strict=True):
        if tensor.data_ptr() % _UNIT_BYTES:
            return _copied(name, tensor)
    return None


def _copied(name: str, tensor: torch.Tensor) -> str:
    return f"{name}, of strides {list(tensor.stride())}, would have to be copied"


def _fit(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether TMA reads such a tensor of 16 bits, all dimensions before the last three as one."""
    if steps[-1] != 1:
        return False
    for n, step in zip(shape[:-1], steps[:-1], strict=True):
        if n != 1 and (step == 0 or step % _UNIT):
            return False
    return all(
        shape[at] == 1 or steps[at] == steps[at + 1] * shape[at + 1] for at in range(len(shape) - 4)
    )


def transformed(tensors: tuple[torch.Tensor, ...]) -> str | None:
    """Why torch takes tensors that are more than memory, or that it transforms."""
    found = foreign(tensors, _is_plain)
    if found or torch.compiler.is_compiling():
        return found
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        return "a tensor has a tangent"
    return transforming()


def _is_plain(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind in _PLAIN or kind is FakeTensor or kind.__torch_dispatch__ is _NO_DISPATCH


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def elsewhere(tensor: torch.Tensor) -> str | None:
    """Why torch computes on the device of a tensor."""
    device = tensor.device
    if device.type != "cuda":
        return f"query is on {device}"
    return unserved(tensor.get_device())

"""Which calls torch computes whatever they ask for: of tensors or transforms that are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def foreign(tensors: Iterable[torch.Tensor], taken: Callable[[torch.Tensor], bool]) -> str | None:
    """Why torch takes tensors that are more than memory; `taken` are classes that are not."""
    for tensor in tensors:
        if tensor.is_nested or tensor.layout != torch.strided:
            return "a tensor is nested or sparse"
        if not taken(tensor):
            return f"torch knows what to do with a {type(tensor).__name__}"
    return None


def transforming() -> str | None:
    """Why torch takes any call that is made here."""
    if torch._C._are_functorch_transforms_active():
        return "this is inside of vmap, grad or another transform of torch.func"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace records torch's operators"
    return None

"""State dicts of layers whose parameters share one storage, as gate and up of a gated layer do.

Libraries that write safetensors take tensors of one storage for copies of each other: safetensors
refuses them, and accelerate leaves out all but one. Here each tensor has a storage of its own, in
the memory of its parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

_DEVICES = ("cpu", "cuda")


def separate_storages(state: dict[str, Any], keys: Iterable[str]) -> None:
    """Give the tensors of these keys a storage each, in the memory that they have.

    Args:
        state: A state dict, which is changed.
        keys: Names in it; others are left out. Parameters (keep_vars=True), subclasses of tensors
            and memory that is shared between processes stay as they are.
    """
    for key in keys:
        tensor = state.get(key)
        if type(tensor) is torch.Tensor and _has_more_storage(tensor):
            # Through bytes: DLPack has no type for some fp8 formats.
            alone: torch.Tensor = from_dlpack(tensor.flatten().view(torch.uint8))
            state[key] = alone.view(tensor.dtype).view(tensor.shape)


def separate(parameter: torch.nn.Parameter | None) -> None:
    """Move a parameter to memory of its own if it shares a storage; it stays the same object."""
    if parameter is not None and _has_more_storage(parameter):
        with torch.inference_mode(False):  # whose tensors could not be trained
            parameter.data = parameter.detach().clone()


def _has_more_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a contiguous part of a storage that this process has in memory."""
    return (
        tensor.device.type in _DEVICES
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not tensor.is_shared()  # type: ignore[no-untyped-call]
        and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize
    )

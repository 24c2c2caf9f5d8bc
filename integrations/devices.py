"""Which GPUs have kernels; on others, and without one, torch computes."""

from __future__ import annotations

import torch

from warploom.generator.architectures import serving, titles

reasons: dict[int, str | None] = {-1: "its tensors are not on a GPU"}
"""What is known of devices, by their numbers; -1 is the CPU. Every call asks."""


def unserved(device: int) -> str | None:
    """Why torch computes on the GPU of this number, if it does; -1 is the CPU.

    Without CUDA only fake tensors are on one, and who traces them says for which GPU.
    """
    if device in reasons:
        return reasons[device]
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    found = None
    if not serving((properties.major, properties.minor)):
        found = f"cuda:{device} is {properties.name}; kernels exist for {titles()}"
    if not torch.compiler.is_compiling():
        reasons[device] = found
    return found

"""Offsets of packed sequences, sound or not, and bands of NaN around tensors."""

from __future__ import annotations

import time
from typing import Any

import torch
from rooms import Guarded


def packed(total_q: int, total_k: int, batch: int = 1) -> dict[str, Any]:
    """The keywords of one packed sequence after the other, all of them empty."""
    offsets = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    longest = {"max_seqlen_q": total_q, "max_seqlen_k": total_k}
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **longest}


TOTAL, BAND, POISON = 700, 512, 7.0
# What kernels make of them, where that is clear: an offset counts as the nearest in the tensors.
CLAMPED = {
    (0, 150, 1000): (0, 150, 700),
    (0, 150, 700, 2**31 - 1): (0, 150, 700, 700),
    (-64, 150, 700): (0, 150, 700),
    (-(2**31), 150, 2**31 - 1): (0, 150, 700),
    (900, 1000): (700, 700),
    (-9, -5): (0, 0),
}
DECREASING = [
    (0, 500, 200, 700),
    (700, 0),
    (0, 700, 0, 700),
    (2**31 - 1, -(2**31), 2**31 - 1),
    (300, 900, -500, 64, 63, 640, 700, 100),
]


def random_offsets(count: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(2, 12, (count,), generator=generator).tolist()
    return [tuple(torch.randint(-400, 1100, (n,), generator=generator).tolist()) for n in sizes]


WILD = [*CLAMPED, *DECREASING, *random_offsets(12)]


def offsets(values: tuple[int, ...]) -> dict[str, Any]:
    made = torch.tensor(values, dtype=torch.int32, device="cuda")
    return {"cu_seqlens_q": made, "cu_seqlens_k": made}


def banded(tensor: torch.Tensor) -> Guarded:
    """A copy between bands of NaN, each of `BAND` rows or more."""
    beside = BAND * max(1, tensor[0].numel()) if tensor.dim() == 3 else BAND * tensor.shape[0]
    room = torch.full((tensor.numel() + 2 * beside,), -1, device="cuda")
    room = room.to({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    inside = torch.zeros(room.shape, dtype=torch.bool, device="cuda")
    inside[beside:-beside] = True
    view = room.view(tensor.dtype)[beside:-beside].view(tensor.shape)
    view.copy_(tensor)
    return Guarded(room, view, inside)


def await_gpu(seconds: float = 20) -> None:
    """Wait for all that was launched, but not for ever."""
    done, begun = torch.cuda.Event(), time.monotonic()
    done.record()
    while not done.query():
        assert time.monotonic() - begun < seconds, "a kernel hangs"
        time.sleep(0.001)

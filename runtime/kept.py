"""Small buffers that are zeros between launches: every launch leaves them as it found them.

They take no memset. Launches that may run at the same time must not share one: a plan has one for
each stream, and a captured launch has its own for good, since a graph may be replayed anywhere.
None is given back: that would have to wait for the GPU.
"""

from __future__ import annotations

import os
import threading

import torch

_SLOT_BYTES = 128  # a cache line: counters of different launches do not meet in one
_SLOTS = 1024  # of a slab
_RESERVE = 256  # for captures, which cannot allocate: fewer than these are left to nobody else

_lock = threading.Lock()
_slabs: dict[int, list[torch.Tensor]] = {}  # by device; the last has unused slots
_used: dict[int, int] = {}  # of the last slab

os.register_at_fork(after_in_child=_slabs.clear)


def prepare(device: int) -> None:
    """Make sure that `take` has something to give; not during a capture."""
    with _lock:
        if device not in _slabs or _used[device] > _SLOTS - _RESERVE:
            slab = torch.zeros(_SLOTS * _SLOT_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
            torch.cuda.current_stream(
                device
            ).synchronize()  # once: other streams use it from now on
            _slabs.setdefault(device, []).append(slab)
            _used[device] = 0


def take(device: int, size: int) -> int | None:
    """Return the address of `size` bytes that nobody has yet; None where none are left."""
    with _lock:
        slots = -(-size // _SLOT_BYTES)
        if device not in _slabs or _used[device] + slots > _SLOTS:
            return None
        address = _slabs[device][-1].data_ptr() + _used[device] * _SLOT_BYTES
        _used[device] += slots
        return address

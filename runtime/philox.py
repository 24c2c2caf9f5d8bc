"""Random numbers that are functions of a state and of a place: Philox (Salmon et al., 2011).

Kernels and references compute the same words from int64 [2], whatever the schedule.
"""

from __future__ import annotations

import torch

LOW = (1 << 32) - 1
_FACTORS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7  # the fewest with which Philox4x32 passes BigCrush


def drawn(device: torch.device) -> torch.Tensor:
    """A new state of torch's generator of the device: captured graphs draw one at each replay."""
    # Bounds of 31 bits: torch.compile has those of its GPU kernels as int32.
    return torch.randint((1 << 31) - 1, (2,), dtype=torch.int64, device=device)


def words_of(state: torch.Tensor) -> list[torch.Tensor]:
    """The four words of a state: the lower half of each of its numbers, then the upper."""
    return [one >> by & LOW for one in state for by in (0, 32)]


def philox(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Philox4x32's four words for key 0, in int64: products wrap, and hold all 64 bits.

    Two rounds make each a function of all four, so that words have the shape of all.
    """
    for index in range(_ROUNDS):
        first, second = (index * one & LOW for one in _WEYL)
        left, right = a * _FACTORS[0], c * _FACTORS[1]
        a, b = (right >> 32 & LOW) ^ b ^ first, right & LOW
        c, d = (left >> 32 & LOW) ^ d ^ second, left & LOW
    return a, b, c, d

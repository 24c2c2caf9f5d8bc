"""Stochastic rounding: which of two neighbours a value becomes, by Philox of a state.

Kernels and the reference agree bit by bit, whatever the schedule.
"""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.runtime.tensors import shown

_LOW = (1 << 32) - 1
_FACTORS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7  # the fewest with which Philox4x32 passes BigCrush (Salmon et al., 2011)
_GROUP = 8  # values of a row that share four words
# Bits of fp32's fraction that a type has not, and its smallest normal number.
_TYPES = {torch.float8_e4m3fn: (20, 2.0**-6), torch.float8_e5m2: (21, 2.0**-14)}


def drawn(device: torch.device) -> torch.Tensor:
    """A new state of torch's generator of the device: captured graphs draw one at each replay."""
    # Bounds of 31 bits: torch.compile has those of its GPU kernels as int32.
    return torch.randint((1 << 31) - 1, (2,), dtype=torch.int64, device=device)


def check_state(state: torch.Tensor) -> None:
    """Raise ProblemError for a state that kernels cannot read."""
    if state.shape != (2,) or state.dtype != torch.int64 or not state.is_contiguous():
        raise ProblemError(
            f"rounding_state {list(state.shape)} {shown(state.dtype)}",
            rule="must be int64 [2], contiguous",
            fix="torch.randint(2**62, (2,), device=x.device) makes one; None has one drawn",
        )


def numbers(state: torch.Tensor, rows: int, columns: int, *, transposed: bool) -> torch.Tensor:
    """The 16 random bits of each value of a matrix, x or x.T: int64 [rows, columns]."""
    device = state.device
    a, b, c, d = _philox(*[state[at // 2] >> 32 * (at % 2) & _LOW for at in range(4)])
    row = torch.arange(rows, device=device)[:, None]
    group = torch.arange(-(-columns // _GROUP), device=device)
    words = torch.stack(_philox(row ^ a, group ^ b, int(transposed) ^ c, d), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # the lower half is the first value's
    return halves.reshape(rows, group.shape[0] * _GROUP)[:, :columns]


def rounded(values: torch.Tensor, random: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values as neighbours that the type has, by the random bits of each; NaN stays NaN.

    The random bits are added to those that the type has not, which are then left out. Below the
    smallest normal number, that is added first, so that the bits are those of subnormal numbers.
    """
    if dtype == torch.int8:
        magnitude, bits, half = values.abs().clamp(max=128.0), 16, 0
        base = torch.full_like(values, 128.0)
    else:
        bits, smallest = _TYPES[dtype]
        magnitude, half = values.abs(), 1 << (bits - 17)
        base = torch.where(magnitude < smallest, smallest, 0.0)
    wide = (magnitude + base).view(torch.int32).long() + (random << (bits - 16)) + half
    wide = (wide >> bits << bits).clamp(max=0x7F800000).int().view(torch.float32)
    return torch.where(values.isnan(), values, torch.copysign(wide - base, values))


def _philox(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Philox4x32's four words for key 0, in int64: products wrap, and hold all 64 bits.

    Two rounds make each a function of all four, so that words have the shape of all.
    """
    for index in range(_ROUNDS):
        first, second = (index * one & _LOW for one in _WEYL)
        left, right = a * _FACTORS[0], c * _FACTORS[1]
        a, b = (right >> 32 & _LOW) ^ b ^ first, right & _LOW
        c, d = (left >> 32 & _LOW) ^ d ^ second, left & _LOW
    return a, b, c, d

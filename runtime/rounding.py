"""Stochastic rounding: which of two neighbours a value becomes, by Philox of a state.

Casts and epilogues of GEMMs round like this. Kernels and the reference agree bit by bit, whatever
the schedule.
"""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.runtime.philox import philox, words_of
from warploom.runtime.tensors import shown

_GROUP = 8  # values of a row that share four words
# Bits of fp32's fraction that a type has not, and its smallest normal number.
_TYPES = {
    torch.float8_e4m3fn: (20, 2.0**-6),
    torch.float8_e5m2: (21, 2.0**-14),
    torch.float16: (13, 2.0**-14),
    torch.bfloat16: (16, 2.0**-126),
}
WORDS = ("nearest", "stochastic")


def check_rounding(rounding: object, state: torch.Tensor | None) -> None:
    """Raise ProblemError for an unknown rounding, and for a state that is missing or not read."""
    if not isinstance(rounding, str) or rounding not in WORDS:
        raise ProblemError(
            f"rounding {shown(rounding)}",
            rule=f"must be one of {', '.join(WORDS)}",
            fix="use one of them",
        )
    if rounding == "stochastic" and state is None:
        raise ProblemError(
            "rounding stochastic without rounding_state",
            rule="must be passed with the state of its random numbers",
            fix="torch.randint(2**62, (2,), device=x.device) makes one",
        )
    if rounding == "nearest" and state is not None:
        raise ProblemError(
            "rounding_state with rounding nearest",
            rule="must be left out: rounding to nearest has no random numbers",
            fix='pass rounding="stochastic", or leave it out',
        )


def check_state(state: torch.Tensor) -> None:
    """Raise ProblemError for a state that kernels cannot read."""
    if state.shape != (2,) or state.dtype != torch.int64 or not state.is_contiguous():
        raise ProblemError(
            f"rounding_state {list(state.shape)} {shown(state.dtype)}",
            rule="must be int64 [2], contiguous",
            fix="torch.randint(2**62, (2,), device=x.device) makes one; None makes a random one",
        )


def numbers(state: torch.Tensor, rows: int, columns: int, *, transposed: bool) -> torch.Tensor:
    """The 16 random bits of each value of a matrix, x or x.T: int64 [rows, columns]."""
    device = state.device
    a, b, c, d = philox(*words_of(state))
    row = torch.arange(rows, device=device)[:, None]
    group = torch.arange(-(-columns // _GROUP), device=device)
    words = torch.stack(philox(row ^ a, group ^ b, int(transposed) ^ c, d), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # the lower half is the first value's
    return halves.reshape(rows, group.shape[0] * _GROUP)[:, :columns]


def patch_numbers(state: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The random number of each element of a GEMM's D: int64 [rows, columns].

    Numbers have as many bits as `dtype` leaves out of fp32's. Rows r and r + 8 of columns c, c + 1,
    c + 8 and c + 9 share four words, as threads have them; two columns the ends of one.
    """
    bits = _TYPES[dtype][0]
    device = state.device
    a, b, c, d = philox(*words_of(state))
    down, across = (
        torch.arange(0, rows, 16, device=device),
        torch.arange(0, columns, 16, device=device),
    )
    row = (down[:, None] + torch.arange(8, device=device)).flatten()[:, None]
    column = (across[:, None] + torch.arange(0, 8, 2, device=device)).flatten()
    words = torch.stack(philox(row ^ a, column ^ b, 2 ^ c, d), -1)  # right 8 columns, lower 8 rows
    ends = torch.stack((words & ((1 << bits) - 1), words >> (32 - bits)), -1)
    parts = ends.reshape(len(down), 8, len(across), 4, 2, 2, 2).permute(0, 5, 1, 2, 4, 3, 6)
    return parts.reshape(len(down) * 16, len(across) * 16)[:rows, :columns]


def rounded(
    values: torch.Tensor, random: torch.Tensor, dtype: torch.dtype, *, width: int = 16
) -> torch.Tensor:
    """fp32 values as neighbours that the type has, by random numbers of so many bits; NaN stays.

    The random bits are added to those that the type has not, which are then left out. Below the
    smallest normal number, that is added first, so that the bits are those of subnormal numbers.
    """
    if dtype == torch.int8:
        magnitude, bits = values.abs().clamp(max=128.0), 16
        base = torch.full_like(values, 128.0)
    else:
        bits, smallest = _TYPES[dtype]
        magnitude = values.abs()
        base = torch.where(magnitude < smallest, smallest, 0.0)
    added = (random << bits >> width) + (1 << bits >> width + 1)  # half a step of the number
    wide = (magnitude + base).view(torch.int32).long() + added
    wide = (wide >> bits << bits).clamp(max=0x7F800000).int().view(torch.float32)
    return torch.where(values.isnan(), values, torch.copysign(wide - base, values))


def rounded_in_patches(
    values: torch.Tensor, state: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """fp32 values [m, n] as the neighbours that an epilogue rounds them to."""
    rows, columns = values.shape
    numbers = patch_numbers(state, rows, columns, dtype)
    return rounded(values, numbers, dtype, width=_TYPES[dtype][0])

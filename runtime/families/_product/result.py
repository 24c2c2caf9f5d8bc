"""The result D of a GEMM call: its type, how it lies in memory, how it can be stored there."""

from __future__ import annotations

from math import prod

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.elements import element
from warploom.generator.families._product import Store
from warploom.generator.tensor_maps import PITCH_BYTES, readable
from warploom.runtime.elements import NAMES, name_of
from warploom.runtime.families._product.batches import batches, step_pitch
from warploom.runtime.operands import refuse_repeated


def result_type(
    a: torch.Tensor, out: torch.Tensor | None, asked: torch.dtype | None, has_epilogue: bool
) -> torch.dtype:
    """The type of D: as asked, else out's, else the default for the operands."""
    if asked is not None:
        require_dtype("out_dtype", asked, NAMES)
        return asked
    if out is not None:
        return out.dtype
    if name_of(a.dtype, "a") == "int8" and not has_epilogue:
        return torch.int32
    return a.dtype if element(name_of(a.dtype, "a")).bits == 16 else torch.bfloat16


def check_out(
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    shared: tuple[int, ...] | None,
) -> tuple[int, int]:
    """Check D [*shape], and return the elements between its rows and between its batches.

    `shared` are its batches; None where it has none. Raises ProblemError for an `out` of another
    shape, type or device, or that no pitch leads through.
    """
    name_of(dtype, "out")
    m, n = shape[-2:]
    if out is None:
        return n, m * n
    if tuple(out.shape) != shape or out.dtype != dtype or out.get_device() != device:
        raise ProblemError(
            f"out {list(out.shape)} {out.dtype} on {out.device}",
            rule=f"must be {list(shape)} of {dtype} on the device of a",
            fix="leave out=None to have it made",
        )
    if out.numel() == 0:
        return n, m * n
    refuse_repeated("out", out)
    pitch: int | None
    apart: int | None = 0
    if shared is None:
        pitch = step_pitch(out, shape[:-1], trailing=1)
    else:
        pitch, lie = out.stride(-2), batches(out, shared)
        apart = lie.pitch if lie else None
    if pitch is None or apart is None or (n > 1 and out.stride(-1) != 1):
        through = "through all rows" if shared is None else "between rows and one between batches"
        raise ProblemError(
            f"out {list(out.shape)} with strides {list(out.stride())}",
            rule=f"must have a contiguous last dimension, one pitch {through}",
            fix="use a row-major out",
        )
    one_row = prod(shape[:-1] if shared is None else (m,)) == 1
    return -(-n // 16) * 16 if one_row else pitch, apart  # of one row: any


def storing(
    out: torch.Tensor | None,
    n: int,
    pitches: tuple[int, int],
    d_type: torch.dtype,
    *,
    paired: bool,
) -> Store:
    """How D can be stored where it lies: also by TMA, or directly only.

    TMA stores 16 bytes at a time: rows must end, as well as begin, at a multiple of them. And its
    kernels read the epilogue's operands in pairs, which must be possible (`paired`).
    """
    size = element(NAMES[d_type]).bytes
    base = 0 if out is None else out.data_ptr()
    whole = n * size % PITCH_BYTES == 0 and readable(base, *(pitch * size for pitch in pitches))
    return "tma" if whole and paired else "direct"

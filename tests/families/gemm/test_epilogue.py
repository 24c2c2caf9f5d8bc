"""Operands of the epilogue: where rows and batches lie, and which of them may be read in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families._product.call import Checked
from warploom.runtime.families.gemm.call import GemmCall

BF16 = torch.bfloat16
M, N = 5, 16  # an odd m: what is read by rows lies an odd number of elements apart


def checked(listed: Sequence[tuple[Any, ...]], *batches: int, m: int = M) -> Checked:
    """Check a call of D [*batches, m, N]: stored by TMA, unless its epilogue forbids it."""
    a, b = torch.zeros(*batches, m, 32, dtype=BF16), torch.zeros(*batches, 32, N, dtype=BF16)
    return GemmCall(a, b, listed).checked()


def zeros(*shape: int, pitch: int = N, shift: int = 0) -> torch.Tensor:
    """Zeros in rows of `pitch` elements, `shift` past an address that is a multiple of 64 bytes."""
    room = torch.zeros(shift + prod(shape[:-1]) * pitch)[shift:]
    return room.view(*shape[:-1], pitch)[..., : shape[-1]]


# ---- Pairs ---------------------------------------------------------------------------------------

READ_BY_COLUMN = {
    "scale_column": lambda **lie: ("scale_column", zeros(3, N, **lie)),
    "bias": lambda **lie: ("bias", zeros(3, N, **lie)),
    "residual": lambda **lie: ("residual", zeros(3, M, N, **lie), 1.0),
}


@pytest.mark.parametrize("kind", READ_BY_COLUMN)
def test_what_is_read_by_column_lies_in_pairs_or_keeps_d_from_tma(kind: str) -> None:
    make = READ_BY_COLUMN[kind]
    assert checked([make()], 3).store == "tma"
    assert checked([make(pitch=N + 2, shift=2)], 3).store == "tma"
    assert checked([make(pitch=N + 1)], 3).store == "direct"
    assert checked([make(shift=1)], 3).store == "direct"


def test_scales_of_rows_need_no_pairs() -> None:
    """They are read one by one: their batches, m apart, and their address may be odd."""
    scale = zeros(3, M, pitch=M, shift=1)
    found = checked([("scale_row", scale)], 3)
    assert found.problem.batch_pitch_steps == (M,)
    assert found.store == "tma"
    pitched = ("bias", zeros(3, N, pitch=N + 1))
    assert checked([("scale_row", scale), pitched], 3).store == "direct"


# ---- Rows of a residual --------------------------------------------------------------------------

ROWS: dict[str, tuple[torch.Tensor, int]] = {
    "a matrix": (zeros(6, N, pitch=20), 20),
    "in two dimensions": (zeros(2, 3, N, pitch=20), 20),
    "every other row": (torch.zeros(4, 3, 20)[:, :, :N].flatten(0, 1)[::2], 40),
    "an extent of 1 between": (torch.zeros(2, 3, 20).unsqueeze(1)[..., :N], 20),
    "an extent of 1 with any stride": (
        torch.zeros(400).as_strided((6, 1, N), (20, 7, 1)),
        20,
    ),
    "an extent of 1 inside, with any stride": (
        torch.zeros(400).as_strided((2, 1, 3, N), (60, 7, 20, 1)),
        20,
    ),
    "one row for all": (torch.zeros(N).expand(2, 3, N), 0),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_dimensions_of_a_residual_may_be_rows_one_pitch_apart(name: str) -> None:
    residual, pitch = ROWS[name]
    found = checked([("residual", residual, 1.0)], m=6)
    assert found.problem.pitch_c == (pitch,)
    room = residual.as_strided((5 * pitch + N,), (1,)).normal_()
    flat = torch.stack([room[row * pitch :][:N] for row in range(6)])
    a, b = torch.randn(6, 32).to(BF16), torch.randn(32, N).to(BF16)
    made = warploom.gemm(a, b, residual=residual, out_dtype=torch.float32)
    assert torch.equal(made, warploom.gemm(a, b, residual=flat, out_dtype=torch.float32))


@pytest.mark.parametrize(
    "residual",
    [
        torch.zeros(2, 4, N)[:, :3],
        torch.zeros(3, 2, N).transpose(0, 1),
        torch.zeros(3, N).expand(2, 3, N),
        torch.zeros(2, 1, N).expand(2, 3, N),
    ],
    ids=["a gap after each three", "in another order", "repeated", "each repeated"],
)
def test_a_residual_whose_rows_no_one_pitch_leads_through_is_refused(
    residual: torch.Tensor,
) -> None:
    with pytest.raises(ProblemError, match=r"residual of shape \[2, 3, 16\].*\[6, 16\] here"):
        checked([("residual", residual, 1.0)], m=6)

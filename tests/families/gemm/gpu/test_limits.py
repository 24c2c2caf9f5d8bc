"""Products with extents near 2^31 are right or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gemm_cases as cases
import pytest
import torch
from extents import Refused, assert_refused, count_other, one

import warploom
from warploom.generator.shapes import LARGEST

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
GROUPS = cases.spec(
    (64, 8), consumers=1, swizzle_size=1024, store="direct", kernel_schedule="cooperative"
)


def product(m: int, n: int, k: int, *batches: int, **keywords: Any) -> Callable[[], object]:
    a, b = (*batches, m, k), (*batches, n, k)
    return lambda: warploom.gemm(one(*a), one(*b).mT, **keywords)


REFUSED: Refused = {
    "m": (lambda: product(LARGEST, 1, 1), "m 2147483647"),
    "m past int32": (lambda: product(2**31, 1, 1), "m 2147483648"),
    "n": (lambda: product(1, LARGEST, 1), "n 2147483647"),
    "n past int32": (lambda: product(1, 2**31, 1), "n 2147483648"),
    "n past uint32": (lambda: product(1, 2**33, 1), "n 8589934592"),
    "k": (lambda: product(1, 1, LARGEST), "k 2147483647"),
    "batches": (lambda: product(1, 1, 1, LARGEST - 99), "batches 2147483548: "),
    "tiles": (lambda: product(2**25, 2**25, 8), "tiles of"),
    "group of 2^22 tiles": (
        lambda: product(1, 2**25, 64, spec=GROUPS),
        "swizzle_size 1024 of 4194304",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_32_bits_do_not_count_is_refused_before_anything_is_made(case: str) -> None:
    assert_refused(*REFUSED[case])


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("side", ["m", "n"])
def test_the_longest_side_of_a_product_is_right(side: str) -> None:
    extent = LARGEST - 1024  # what any kernel takes
    long = torch.ones(1, extent, dtype=BF16, device="cuda")
    two = torch.full((1, 1), 2.0, dtype=BF16, device="cuda")
    out = torch.full(
        (extent, 1) if side == "m" else (1, extent), torch.nan, dtype=BF16, device="cuda"
    )
    warploom.gemm(*((long.t(), two) if side == "m" else (two, long)), out=out)
    assert count_other(out, 2.0) == 0


@pytest.mark.usefixtures("memory")
def test_the_longest_sum_of_products_is_right() -> None:
    k = (LARGEST - 8 * 128) // 16 * 16  # what 8 blocks share
    a, b = (torch.zeros(1, k, dtype=torch.uint8, device="cuda") for _ in "ab")
    b.fill_(0x38)  # 1 in e4m3
    for place in (0, k // 2, k - 1):
        a[0, place] = 0x38
    a, b = (operand.view(torch.float8_e4m3fn) for operand in (a, b))
    assert warploom.gemm(a, b.t(), out_dtype=torch.float32).item() == 3


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("n", [8 * (2**21 - 1), 8 * 2**20 + 40_000])
def test_the_widest_band_of_tiles_is_right(n: int) -> None:
    room = torch.full((3, n), -7.0, dtype=BF16, device="cuda")  # the middle row is D
    b = torch.ones(n, 64, dtype=BF16, device="cuda").t()
    warploom.gemm(one(1, 64).contiguous(), b, out=room[1:2], spec=GROUPS)
    assert [count_other(row, value) for row, value in zip(room, (-7, 64, -7), strict=True)] == [
        0
    ] * 3


@pytest.mark.usefixtures("memory")
def test_pitches_past_2_to_the_31_elements_lead_where_they_say() -> None:
    pitch = 2**31 + 8
    rooms = [torch.zeros(pitch + 64, dtype=BF16, device="cuda") for _ in range(3)]
    a, c, d = (room.as_strided((2, 64), (pitch, 1)) for room in rooms)
    small, b = (
        torch.randn(2, 64, device="cuda").bfloat16(),
        torch.randn(64, 64, device="cuda").bfloat16(),
    )
    a.copy_(small)
    c.copy_(2 * small)
    warploom.gemm(a, b, residual=c, out=d)
    assert torch.equal(d, warploom.gemm(small, b, residual=2 * small))

"""Attention with extents near 2^31 is right or refused; no offsets lead outside the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_arena as arena
import attention_cases as cases
import pytest
import torch
from attention_cases import MASKS, operation, short
from attention_offsets import CLAMPED, POISON, TOTAL, WILD, await_gpu, banded, offsets, packed
from extents import Refused, assert_refused, count_other, one

import warploom
from warploom.errors import ProblemError
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def attended(
    heads: int, seq_q: int, seq_k: int, batch: int = 1, **keywords: Any
) -> Callable[[], object]:
    rows, columns = (batch, heads, seq_q, 8), (batch, heads, seq_k, 8)
    return lambda: warploom.attention(one(*rows), one(*columns), one(*columns), **keywords)


def attended_packed(total_q: int, total_k: int, batch: int = 1) -> Callable[[], object]:
    rows, columns, lengths = one(total_q, 1, 8), one(total_k, 1, 8), packed(total_q, total_k, batch)
    return lambda: warploom.attention(rows, columns, columns, **lengths)


REFUSED: Refused = {
    "seq_q": (lambda: attended(1, LARGEST, 1), "seq_q 2147483647"),
    "seq_k": (lambda: attended(1, 1, LARGEST), "seq_k 2147483647"),
    "seq_k past int32": (lambda: attended(1, 1, 2**31), "seq_k 2147483648"),
    "seq_q beside a bound": (
        lambda: attended(1, 2**30, 2**30, window=(None, 2**30 - 2)),
        "seq_q 1073741824",
    ),
    "heads": (lambda: attended(2**15, 1, 1, 2**15), "1073741824 heads of 1 tiles"),
    "total_q": (lambda: attended_packed(2**30, 1), "total_q 1073741824"),
    "total_k": (lambda: attended_packed(1, 2**30 + 1024), "total_k 1073742848"),
    "sequences": (lambda: attended_packed(1, 1, 2**25), "33554432 tiles of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_32_bits_do_not_count_is_refused_before_anything_is_made(case: str) -> None:
    assert_refused(*REFUSED[case])


@pytest.mark.usefixtures("memory")
def test_what_tma_does_not_address_is_told_as_such() -> None:
    """Packed rows 2^34 bytes apart: their tensor map steps back by 2^34 less a row."""
    apart = 2**33 + 8
    q = torch.empty(apart + 8, dtype=BF16, device="cuda").as_strided((2, 1, 8), (apart, 8, 1))
    k = one(2, 1, 8).clone(memory_format=torch.contiguous_format)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    with pytest.raises(ProblemError, match=r"q at 0x.*must be readable by TMA"):
        warploom.attention(
            q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=2, max_seqlen_k=2
        )


@pytest.mark.usefixtures("memory")
def test_the_most_packed_tokens_are_right() -> None:
    total = 2**30 - 1024
    k = torch.zeros(total, 1, 8, dtype=BF16, device="cuda")
    k[-24:] = 3.0
    q = one(1, 1, 8).contiguous()
    offsets_q, offsets_k = (
        torch.tensor(offsets, dtype=torch.int32, device="cuda")
        for offsets in ([0, 0, 1], [0, total - 24, total])
    )
    lengths = {"max_seqlen_q": 1, "max_seqlen_k": total - 24}
    out = warploom.attention(q, k, k, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, **lengths)
    assert count_other(out, 3.0) == 0


@pytest.mark.usefixtures("memory")
def test_head_strides_past_2_to_the_31_elements_lead_where_they_say() -> None:
    pitch = 2**31 + 8
    rooms = [torch.zeros(pitch + 64 * 64, dtype=BF16, device="cuda") for _ in range(2)]
    q, out = (room.as_strided((1, 2, 64, 64), (2 * pitch, pitch, 64, 1)) for room in rooms)
    small, k, v = torch.randn(3, 1, 2, 64, 64, device="cuda").bfloat16()
    q.copy_(small)
    warploom.attention(q, k, v, out=out)
    assert torch.equal(out, warploom.attention(small, k, v))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kernel", cases.PACKED, ids=short)
def test_no_offsets_lead_a_forward_pass_outside(kernel: KernelSpec) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    made = arena.packed(kernel, [TOTAL], [TOTAL], **keywords)
    made.q, made.k, made.v, made.out = (
        banded(given.view) for given in (made.q, made.k, made.v, made.out)
    )

    def run(values: tuple[int, ...], longest: int = TOTAL) -> torch.Tensor:
        made.out.view.fill_(POISON)
        made.keywords |= offsets(values) | {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out, _ = made.run()
        await_gpu()
        assert made.out.untouched_outside(), values
        assert out.isfinite().all(), values  # what is read outside is NaN
        return out.clone()

    for values in WILD:
        found = run(values)
        if values in CLAMPED:
            assert torch.equal(found, run(CLAMPED[values])), values
    run((0, 150, TOTAL), longest=1)

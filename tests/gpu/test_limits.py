"""Extents near 2^31 are right or refused; offsets of packed sequences lead nowhere outside.

What is refused is refused before memory is taken, so that its tensors may be views of one element.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import attention_arena
import attention_backward_arena
import attention_backward_cases
import attention_cases
import cases
import pytest
import torch
from arena import Guarded
from attention_cases import MASKS, operation, short

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.attention_backward import order
from warploom.generator.limits import LARGEST
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.problem import Call
from warploom.runtime.families.attention_backward import plan as attention_backward
from warploom.runtime.families.attention_backward.problem import BackwardCall

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
GIGABYTES = 20  # that a test takes at most


def one(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of ones, all of them one element in memory."""
    return torch.ones((1,) * len(shape), device="cuda").to(dtype).expand(shape)


@pytest.fixture
def memory() -> Iterator[None]:
    """Much of it, given back at once: other processes test on this GPU."""
    if torch.cuda.get_device_properties(0).total_memory < 2 * GIGABYTES << 30:
        pytest.skip(f"needs {GIGABYTES} GB of GPU memory to itself")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def count_other(tensor: torch.Tensor, value: float) -> int:
    """How many elements of a long tensor are something else; NaN is."""
    chunks = tensor.reshape(-1).split(1 << 28)
    return sum(int((chunk != value).sum()) for chunk in chunks)


# ---- Refused -------------------------------------------------------------------------------------

GROUPS = cases.spec((64, 8), consumers=1, group=1024, store="direct", roles="cooperative")


def product(m: int, n: int, k: int, *batches: int, **keywords: Any) -> Callable[[], object]:
    a, b = (*batches, m, k), (*batches, n, k)
    return lambda: warploom.gemm(one(*a), one(*b).mT, **keywords)


def attended(
    heads: int, seq_q: int, seq_k: int, batch: int = 1, **keywords: Any
) -> Callable[[], object]:
    rows, columns = (batch, heads, seq_q, 8), (batch, heads, seq_k, 8)
    return lambda: warploom.attention(one(*rows), one(*columns), one(*columns), **keywords)


def packed(total_q: int, total_k: int, batch: int = 1) -> dict[str, Any]:
    offsets = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    longest = {"max_seqlen_q": total_q, "max_seqlen_k": total_k}
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **longest}


def attended_packed(total_q: int, total_k: int, batch: int = 1) -> Callable[[], object]:
    rows, columns, lengths = one(total_q, 1, 8), one(total_k, 1, 8), packed(total_q, total_k, batch)
    return lambda: warploom.attention(rows, columns, columns, **lengths)


def gradients(q: torch.Tensor, k: torch.Tensor, **keywords: Any) -> Callable[[], object]:
    """A backward pass by itself: its forward pass would be refused before."""
    lse = one(*((q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]), dtype=torch.float32)
    made = BackwardCall(Call(q, k, k, **keywords), q, lse, q)
    return lambda: attention_backward.attention_backward(made)


REFUSED: dict[str, tuple[Callable[[], Callable[[], object]], str]] = {
    "m": (lambda: product(LARGEST, 1, 1), "m 2147483647"),
    "m past int32": (lambda: product(2**31, 1, 1), "m 2147483648"),
    "n": (lambda: product(1, LARGEST, 1), "n 2147483647"),
    "n past int32": (lambda: product(1, 2**31, 1), "n 2147483648"),
    "n past uint32": (lambda: product(1, 2**33, 1), "n 8589934592"),
    "k": (lambda: product(1, 1, LARGEST), "k 2147483647"),
    "batches": (lambda: product(1, 1, 1, LARGEST - 99), "batches 2147483548: "),
    "tiles": (lambda: product(2**25, 2**25, 8), "tiles of"),
    "group of 2^22 tiles": (lambda: product(1, 2**25, 64, spec=GROUPS), "group 1024 of 4194304"),
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
    "gradients of seq_q": (
        lambda: gradients(one(1, 1, LARGEST, 8), one(1, 1, 1, 8)),
        "seq_q 2147483647",
    ),
    "gradients of seq_k": (
        lambda: gradients(one(1, 1, 1, 8), one(1, 1, LARGEST, 8)),
        "seq_k 2147483647",
    ),
    "gradients of heads": (
        lambda: gradients(one(2**15, 2**15, 1, 8), one(2**15, 2**15, 1, 8)),
        "1073741824 heads of 1 tiles",
    ),
    "gradients of total_k": (
        lambda: gradients(one(1, 1, 8), one(2**30, 1, 8), **packed(1, 2**30)),
        "total_k 1073741824",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_32_bits_do_not_count_is_refused_before_anything_is_made(case: str) -> None:
    make, said = REFUSED[case]
    call = make()
    before, taken = warploom.counters.as_dict(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        with pytest.raises(ProblemError, match="must be smaller: kernels count to") as told:
            call()
        assert said in told.value.value
    assert warploom.counters.as_dict() == before
    assert torch.cuda.max_memory_allocated() - taken < 1 << 20


@pytest.mark.usefixtures("memory")
def test_what_tma_does_not_address_is_told_as_such() -> None:
    """Packed rows 2^34 bytes apart: their tensor map steps back by 2^34 less a row."""
    apart = 2**33 + 8
    q = torch.empty(apart + 8, dtype=BF16, device="cuda").as_strided((2, 1, 8), (apart, 8, 1))
    k = one(2, 1, 8).clone(memory_format=torch.contiguous_format)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    with pytest.raises(ProblemError, match=r"q at 0x.*must be as TMA takes it"):
        warploom.attention(
            q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=2, max_seqlen_k=2
        )


# ---- Right ---------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("memory")
def test_head_strides_past_2_to_the_31_elements_lead_where_they_say() -> None:
    pitch = 2**31 + 8
    rooms = [torch.zeros(pitch + 64 * 64, dtype=BF16, device="cuda") for _ in range(2)]
    q, out = (room.as_strided((1, 2, 64, 64), (2 * pitch, pitch, 64, 1)) for room in rooms)
    small, k, v = torch.randn(3, 1, 2, 64, 64, device="cuda").bfloat16()
    q.copy_(small)
    warploom.attention(q, k, v, out=out)
    assert torch.equal(out, warploom.attention(small, k, v))


# ---- Offsets of packed sequences -----------------------------------------------------------------

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


@pytest.mark.usefixtures("attention_built")
@pytest.mark.parametrize("kernel", attention_cases.PACKED, ids=short)
def test_no_offsets_lead_a_forward_pass_outside(kernel: KernelSpec) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    made = attention_arena.packed(kernel, [TOTAL], [TOTAL], **keywords)
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


BACKWARD = [
    kernel for kernel in attention_backward_cases.ALL if operation(kernel).lengths == "packed"
]


@pytest.mark.usefixtures("attention_backward_built")
@pytest.mark.parametrize("rounds", [0, math.inf], ids=["leftward", "rightward"])
@pytest.mark.parametrize("kernel", BACKWARD, ids=attention_backward_cases.short)
def test_no_offsets_lead_a_backward_pass_outside_or_let_it_wait_for_ever(
    kernel: KernelSpec, rounds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic = attention_backward_cases.operation(kernel).deterministic
    if rounds == 0 and not deterministic:
        pytest.skip("kv tiles have a direction only where they add to dq in order")
    monkeypatch.setattr(order, "LEFTWARD_ROUNDS", rounds)
    monkeypatch.setattr(attention_backward, "_plans", {})
    keywords = MASKS[operation(kernel).mask][0]
    made = attention_backward_arena.packed(kernel, [TOTAL], [TOTAL], **keywords)
    forward = made.forward
    forward.q, forward.k, forward.v, forward.out, made.dout = (
        banded(given.view) for given in (forward.q, forward.k, forward.v, forward.out, made.dout)
    )
    made.lse = banded(made.lse).view
    dq, dk, dv = (banded(gradient.view) for gradient in made.gradients)
    made.gradients = (dq, dk, dv)

    def run(values: tuple[int, ...], longest: int = TOTAL) -> list[torch.Tensor]:
        forward.keywords |= offsets(values) | {"max_seqlen_q": longest, "max_seqlen_k": longest}
        for gradient in made.gradients:
            gradient.view.fill_(POISON)
        found = made.run()
        await_gpu()
        assert all(gradient.untouched_outside() for gradient in made.gradients), values
        return [gradient.clone() for gradient in found]

    usual = (0, 150, TOTAL)
    before = run(usual)
    for values in WILD:
        found = run(values)
        if values not in CLAMPED:
            continue
        assert all(gradient.isfinite().all() for gradient in found), values  # NaN lies outside
        if deterministic:
            assert all(map(torch.equal, found, run(CLAMPED[values]))), values
    run(usual, longest=1)
    if deterministic:  # nothing is left of them
        assert all(map(torch.equal, run(usual), before))

"""Which memory a call reads, writes, copies and leaves alone: pages, lengths and views."""

from __future__ import annotations

from collections.abc import Callable

import attention_offsets as offsets
import decode_arena as arena
import decode_cases as cases
import pytest
import torch
from decode_cases import SHAPES, SIMPLE, Shape, short

import warploom
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
BF16 = torch.bfloat16
PAGED = [name for name, kernel in SIMPLE.items() if cases.of(kernel).page]
COUNTED = [name for name, kernel in SIMPLE.items() if cases.of(kernel).lengths]


def made_of(name: str, shape: Shape = SHAPES["ragged"], **told: object) -> arena.Call:
    kernel = SIMPLE[name]
    return arena.call(kernel, cases.fitting(kernel, shape), **told)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", cases.OPTIONS, ids=short)
def test_no_bit_depends_on_rows_that_do_not_count(kernel: KernelSpec) -> None:
    """NaN and infinity in turn, and zeros: in rows past a length, in pages that no table names."""
    made = arena.call(kernel, cases.fitting(kernel, SHAPES["ragged"]))
    first = [one.clone() for one in arena.verify(made)]
    arena.fill(made, cases.of(kernel), seed=0, which=1)
    assert all(map(torch.equal, made.run(), first))
    arena.poison(made, 0, 1.0)
    assert all(map(torch.equal, made.run(), first))


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("name", SIMPLE)
def test_what_is_not_finite_stays_in_its_sequence_and_head(name: str, value: float) -> None:
    made = made_of(name, Shape(4, 2, 3, 2, 500), lengths=[500, 77, 300, 500])
    clean = [one.clone() for one in arena.verify(made)]
    place = made.used.nonzero()[600]  # the second sequence's, or of packed keys the third's
    v = made.v.view if made.v.view.dim() == 3 else made.v.view.transpose(1, 2)
    before = v[(*place.tolist(), 1)].clone()
    v[(*place.tolist(), 1)] = value if v.dtype.itemsize > 1 else torch.nan
    found = made.run()
    touched = 0
    for one, other in zip(found, clean, strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        if one.dim() == 4:
            touched += int((~same).any(-1).any(-1).sum())
    if found[0].dim() == 4:
        assert touched == 3  # heads of one kv head, of one sequence
    v[(*place.tolist(), 1)] = before
    assert all(map(torch.equal, made.run(), clean))


@pytest.mark.parametrize("name", COUNTED)
def test_lengths_that_lead_out_of_the_cache_are_kept_within_it(name: str) -> None:
    wild = [1000, 2**31 - 1, -1, -(2**31), 709, 0, 10**6]
    made = made_of(name, lengths=wild)
    arena.verify(made)


@pytest.mark.parametrize("name", PAGED)
def test_pages_that_are_none_are_kept_within_the_cache(name: str) -> None:
    """Other sequences are right, and what is read is a page of the cache, whichever it is."""
    made = made_of(name, lengths=[700, 500, 709, 64, 1, 0, 300])
    found = [one.clone() for one in arena.verify(made)]
    table = made.keywords["page_table"]
    for bad in (2**31 - 1, -1, -(2**31), len(made.k.view)):
        before = table.clone()
        table[1, :] = bad
        table[2, 1] = bad
        now = made.run()
        offsets.await_gpu()
        for index in (0, 3, 4, 5, 6):
            assert torch.equal(now[0][index], found[0][index])
            assert torch.equal(now[1][index], found[1][index])
        assert made.out.untouched_outside()
        table.copy_(before)
    assert all(map(torch.equal, made.run(), found))


@pytest.mark.parametrize("ends", offsets.WILD, ids=str)
def test_offsets_that_nobody_has_looked_at_lead_nowhere_else(ends: tuple[int, ...]) -> None:
    kernel = SIMPLE["packed"]
    batch = len(ends) - 1
    made = arena.call(kernel, Shape(3, 2, 4, 40, 300), lengths=[300, 250, 150])
    told = torch.tensor(ends, dtype=torch.int32, device=arena.DEVICE)
    rows = torch.linspace(0, len(made.q.view), batch + 1).int().to(arena.DEVICE)
    rows = rows.clamp(max=40 * batch)
    for given in (
        {"cu_seqlens_q": rows, "cu_seqlens_k": told},
        {"cu_seqlens_q": told, "cu_seqlens_k": told},
    ):
        made.out.room.fill_(-1)
        keywords = {**made.keywords, **given, "out": made.out.view, "spec": kernel}
        warploom.attention_decode(*made.tensors, **keywords)
        offsets.await_gpu()
        assert made.out.untouched_outside()


# ---- Views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", SIMPLE)
def test_caches_are_read_where_they_lie(name: str, heads_first: bool) -> None:
    made = made_of(name, heads_first=heads_first)
    arena.verify(made)


def caches(*extents: int) -> torch.Tensor:
    return torch.randn(extents, device=arena.DEVICE).to(BF16)


VIEWS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "k and v in one tensor": lambda: caches(2, 3, 2, 300, 128).unbind(),  # type: ignore[return-value]
    "k and v beside each other in a row": lambda: caches(3, 2, 300, 256).chunk(2, -1),  # type: ignore[return-value]
    "some heads of more": lambda: tuple(caches(2, 3, 7, 300, 128)[:, :, 2:4].unbind()),  # type: ignore[return-value]
    "every other row": lambda: tuple(caches(2, 3, 2, 600, 128)[..., ::2, :].unbind()),  # type: ignore[return-value]
    "batch after rows": lambda: tuple(caches(2, 300, 3, 2, 128).permute(0, 2, 3, 1, 4).unbind()),  # type: ignore[return-value]
    "k that is v": lambda: (caches(3, 2, 300, 128),) * 2,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_caches_are_not_copied(
    view: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    k, v = view()
    q = caches(3, 1, 8, 128).transpose(1, 2)
    told = torch.tensor([300, 1, 177], dtype=torch.int32, device=arena.DEVICE)
    kernel = SIMPLE["plain"]
    expected = warploom.attention_decode(
        q, k.contiguous(), v.contiguous(), cache_seqlens=told, spec=kernel
    )
    before = warploom.counters.copies
    found = warploom.attention_decode(q, k, v, cache_seqlens=told, spec=kernel)
    assert warploom.counters.copies == before
    assert torch.equal(found, expected) and found.transpose(1, 2).is_contiguous()  # as q lies


QUERIES: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "heads before rows": (lambda: caches(3, 8, 2, 128), 0),
    "a part of qkv": (lambda: caches(3, 2, 12, 128)[:, :, :8].transpose(1, 2), 0),
    "a row of more": (lambda: caches(3, 8, 5, 128)[:, :, 1:3], 0),
    "rows that are 8 bytes on": (lambda: caches(3, 8, 2, 132)[..., 4:], 1),
    "every other column": (lambda: caches(3, 8, 2, 256)[..., ::2], 1),
}


@pytest.mark.parametrize("name", QUERIES)
def test_queries_are_copied_only_where_they_cannot_be_read(name: str) -> None:
    make, copies = QUERIES[name]
    q, k = make(), caches(3, 2, 300, 128)
    expected = warploom.attention_decode(q.contiguous(), k, k)
    for _ in range(2):  # the second is planned
        before = warploom.counters.copies
        found = warploom.attention_decode(q, k, k)
        assert warploom.counters.copies - before == copies
        assert torch.equal(found, expected)


def test_a_cache_that_tma_cannot_read_is_refused_before_a_launch() -> None:
    q, k = caches(3, 8, 1, 128), caches(3, 2, 300, 132)[..., 4:]
    launches = warploom.counters.launches
    for _ in range(2):
        with pytest.raises(ProblemError, match="16 bytes"):
            warploom.attention_decode(q, k, k)
    assert warploom.counters.launches == launches


@pytest.mark.parametrize(
    "extents",
    [(0, 2, 4, 1, 65), (2, 0, 1, 1, 65), (2, 2, 4, 0, 65), (2, 2, 4, 1, 0)],
    ids=["no batch", "no heads", "no rows", "no keys"],
)
def test_nothing_to_compute_is_no_launch(extents: tuple[int, ...]) -> None:
    batch, kv_heads, group, rows, keys = extents
    q, k = caches(batch, kv_heads * group, rows, 128), caches(batch, kv_heads, keys, 128)
    before = warploom.counters.launches
    out, lse = warploom.attention_decode(q, k, k, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -torch.inf).all()
    assert warploom.counters.launches == before


def test_overlap_is_refused_however_often_it_is_tried() -> None:
    q, k = caches(3, 8, 1, 128), caches(3, 8, 300, 128)
    for _ in range(2):
        with pytest.raises(ProblemError, match="does not overlap"):
            warploom.attention_decode(q, k, k, out=k[:, :, 7:8])


# ---- Size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["page 64", "plain", "packed keys"])
def test_caches_past_2_to_the_31_elements_are_read_where_they_are(name: str, memory: None) -> None:
    kv_heads, dim, total = 8, 128, 2**21 + 2**12
    assert total * kv_heads * dim > 2**31
    cache = torch.empty(total, kv_heads, dim, dtype=BF16, device=arena.DEVICE)
    cache.normal_(generator=torch.Generator(arena.DEVICE).manual_seed(1))
    q = caches(2, 4 * kv_heads, 1, dim)
    told = torch.tensor([300, 129], dtype=torch.int32, device=arena.DEVICE)
    if name == "page 64":
        paged = cache.view(-1, 64, kv_heads, dim).transpose(1, 2)
        table = torch.arange(len(paged) - 8, len(paged)).int().to(arena.DEVICE)
        table = table.repeat(2, 1)
        found = warploom.attention_decode(q, paged, paged, cache_seqlens=told, page_table=table)
        rows = cache[-512:].transpose(0, 1)
        expected = warploom.attention_decode(
            q, *[rows.expand(2, -1, -1, -1).contiguous()] * 2, cache_seqlens=told
        )
    elif name == "plain":
        halves = cache.view(2, total // 2, kv_heads, dim).transpose(1, 2)
        full = torch.tensor([total // 2, 300], dtype=torch.int32, device=arena.DEVICE)
        found = warploom.attention_decode(q, halves, halves, cache_seqlens=full)[1:]
        rows = halves[1:, :, :300]
        expected = warploom.attention_decode(
            q[1:], *[rows.contiguous()] * 2, cache_seqlens=told[:1]
        )
    else:
        ends = torch.tensor([0, total - 300, total], dtype=torch.int32, device=arena.DEVICE)
        found = warploom.attention_decode(q, cache, cache, cu_seqlens_k=ends, max_seqlen_k=total)[
            1:
        ]
        rows = cache[-300:].transpose(0, 1)[None]
        expected = warploom.attention_decode(
            q[1:], *[rows.contiguous()] * 2, cache_seqlens=told[:1]
        )
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-7)


def test_a_call_takes_memory_for_its_results_and_parts_alone() -> None:
    kernel = SIMPLE["pages"]
    made = arena.call(kernel, Shape(4, 8, 4, 1, 20_000), lengths=[20_000] * 4)
    made.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made.run()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 32 << 20

"""Sequences beside others: batch_invariant bits, and counters and parts that launches leave."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import decode_arena as arena
import decode_cases as cases
import pytest
import torch
from decode_cases import SIMPLE, Shape, short

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built", "poisoned")]
INVARIANT = [
    kernel for kernel in cases.ALL if cases.of(kernel).batch_invariant and cases.of(kernel).lengths
]


def alone(made: arena.Call, index: int) -> arena.Pair:
    """The results of one sequence of a call, by itself."""
    q, k, v = made.tensors
    one = slice(index, index + 1)
    keywords = dict(made.keywords)
    for name in ("cache_seqlens", "cache_leftpad", "page_table"):
        if name in keywords:
            keywords[name] = keywords[name][one]
    if "page_table" not in keywords:
        k, v = k[one], v[one]
        for name in ("scale_k", "scale_v"):
            if name in keywords and keywords[name].dim() == 3:
                keywords[name] = keywords[name][one]
    ends = keywords.pop("cu_seqlens_q", None)
    if ends is None:
        q, out = q[one], torch.full_like(q[one], torch.nan)
    else:
        rows = slice(int(ends[index]), int(ends[index + 1]))
        q, out = q[rows], torch.full_like(q[rows], torch.nan)
        keywords["cu_seqlens_q"] = torch.tensor([0, len(q)]).to(ends)
    given = {"out": out, "spec": made.spec, "return_lse": True, **keywords}
    found: arena.Pair = warploom.attention_decode(q, k, v, **given)
    return found


def of_sequence(made: arena.Call, found: arena.Pair, index: int) -> arena.Pair:
    """The results of one sequence, of those of all."""
    ends = made.keywords.get("cu_seqlens_q")
    if ends is None:
        return found[0][index : index + 1], found[1][index : index + 1]
    rows = slice(int(ends[index]), int(ends[index + 1]))
    return found[0][rows], found[1][:, rows]


@pytest.mark.parametrize("kernel", INVARIANT, ids=short)
def test_no_bit_depends_on_what_a_sequence_is_batched_with(kernel: KernelSpec) -> None:
    lengths = [3000, 1, 700, 0, 129, 2999, 64, 1500, 256, 255, 257, 2048]
    shape = cases.fitting(kernel, Shape(len(lengths), 2, 4, 2, 3000))
    made = arena.call(kernel, shape, lengths=lengths)
    found = arena.verify(made)
    for index in range(shape.batch):
        pairs = zip(of_sequence(made, found, index), alone(made, index), strict=True)
        assert all(arena.same_bits(one, other) for one, other in pairs), index


def test_no_bit_depends_on_the_bound_of_lengths_or_on_where_pages_are() -> None:
    kernel = SIMPLE["invariant"]
    made = arena.call(kernel, Shape(3, 2, 4, 1, 2100), lengths=[2000, 77, 1031])
    first = [one.clone() for one in arena.verify(made)]
    table, (q, k, v) = made.keywords["page_table"], made.tensors
    wider = torch.cat([table, table[:, :1].expand(-1, 300)], 1).contiguous()
    order = torch.randperm(len(k), device=arena.DEVICE)
    moved = torch.argsort(order).int()[wider.clamp(0, len(k) - 1).long()]
    for pages, caches in ((wider, (k, v)), (moved, (k[order], v[order]))):
        keywords = {**made.keywords, "page_table": pages, "spec": kernel, "return_lse": True}
        found = warploom.attention_decode(q, *caches, **keywords)
        assert all(map(torch.equal, found, first))


@pytest.mark.parametrize("name", ["batch_invariant", "batch_invariant, page 16"])
def test_no_bit_depends_on_the_batch_where_no_kernel_is_named(name: str) -> None:
    random = Random(3)
    lengths = [random.choice((1, 300, 4000, random.randint(0, 4000))) for _ in range(100)]
    shape = Shape(len(lengths), 2, 4, 2, 4000)
    made = arena.call(None, shape, of=cases.SINGLE[name], lengths=lengths)
    found = arena.verify(made)
    for index in (0, 1, 50, 99, lengths.index(1), lengths.index(4000)):
        pairs = zip(of_sequence(made, found, index), alone(made, index), strict=True)
        assert all(arena.same_bits(one, other) for one, other in pairs), index


@pytest.mark.parametrize("name", SIMPLE)
def test_launches_with_other_lengths_find_no_part_and_no_count_of_those_before(name: str) -> None:
    kernel, random = SIMPLE[name], Random(7)
    shape = cases.fitting(kernel, Shape(6, 2, 4, 2, 6000))
    calls = []
    for seed in range(6):
        most = (6000, 900, 64, 1, 3000, 0)[seed]
        lengths = [random.randint(0, most) for _ in range(shape.batch - 1)]
        calls.append(arena.call(kernel, shape, lengths=[*lengths, most], seed=seed))
    wanted = [[one.clone() for one in arena.verify(made)] for made in calls]
    for _ in range(20):
        index = random.randrange(len(calls))
        assert all(map(arena.same_bits, calls[index].run(), wanted[index]))


@pytest.mark.parametrize("name", SIMPLE)
def test_a_hundred_launches_behind_each_other_have_the_same_bits(name: str) -> None:
    """Nothing waits for anything but its turn."""
    kernel = SIMPLE[name]
    made = arena.call(kernel, cases.fitting(kernel, Shape(3, 2, 4, 2, 7001)))
    first = arena.bits(made)
    rooms = [torch.empty_like(made.out.room) for _ in range(100)]
    for room in rooms:
        made.run()
        room.copy_(made.out.room)
    arena.assert_right(made, first)
    made.run()
    assert all(torch.equal(room, made.out.room) for room in rooms)


LADDERS: dict[str, Sequence[int]] = {
    "one of all keys": [8000, 0, 0, 0, 0, 0, 0, 0],
    "all but one of one key": [1, 1, 1, 8000, 1, 1, 1, 1],
    "all alike": [1000] * 8,
    "powers of two": [2**i for i in range(8)],
    "one more than tiles": [64 * i + 1 for i in range(8)],
    "none": [0] * 8,
}


@pytest.mark.parametrize("lengths", LADDERS.values(), ids=LADDERS)
@pytest.mark.parametrize("name", SIMPLE)
def test_work_of_any_lengths_is_divided_without_loss(name: str, lengths: Sequence[int]) -> None:
    kernel = SIMPLE[name]
    for kv_heads in (1, 7):
        shape = cases.fitting(kernel, Shape(8, kv_heads, 4, 2, 8000))
        arena.verify(arena.call(kernel, shape, lengths=lengths))


@pytest.mark.parametrize("batch", [1, 31, 33, 257, 1024, 1500])
@pytest.mark.parametrize("name", ["plain", "pages", "packed", "invariant"])
def test_as_many_sequences_as_one_likes_share_the_work(name: str, batch: int) -> None:
    kernel = SIMPLE[name]
    random = Random(batch)
    lengths = [random.choice((0, 1, 5, 64, 200)) for _ in range(batch)]
    shape = cases.fitting(kernel, Shape(batch, 2, 4, 1, 200))
    arena.verify(arena.call(kernel, shape, lengths=lengths))

"""Every bit that a kernel writes, and all that it must not write, against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import attention_append_cases as cases
import pytest
import torch
from attention_append_cases import FULL, PAGED, PLAIN, short, spec

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.families.attention_append import AttentionAppendOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_append.family import written

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_bit_is_the_references(kernel: KernelSpec) -> None:
    cases.made(kernel).verify()
    cases.made(kernel, (5,), (1,), kv_heads=1, heads=1).verify()
    cases.made(kernel, (0, 7, 40), (5, 0, 1), kv_heads=8, heads=64).verify()
    cases.made(kernel, (47, 48, -1, -(2**31), 2**31 - 1, 30), (3, 2)).verify()


@pytest.mark.parametrize("operation", [PLAIN, PAGED, FULL], ids=["plain", "paged", "full"])
def test_any_lengths_tables_and_numbers_of_tokens(operation: AttentionAppendOperation) -> None:
    """Some entries of tables are no pages, some sequences are full, some are left out."""
    drawn = random.Random(operation.cache)
    for seed in range(60):
        batch, columns = drawn.choice((1, 2, 7, 33, 70)), drawn.choice((1, 3, 8))
        capacity = columns * cases.PAGE
        edges = (0, 1, capacity - 1, capacity, capacity + 5, -1)
        lengths = [
            drawn.choice(edges) if drawn.random() < 0.3 else drawn.randrange(capacity)
            for _ in range(batch)
        ]
        new = [drawn.choice((0, 1, 1, 2, 9)) for _ in range(batch)]
        new = new if operation.packed else [max(1, new[0])]
        extents = {"kv_heads": drawn.choice((1, 2, 5)), "heads": drawn.choice((1, 6, 40))}
        made = cases.made(
            spec(operation), lengths, new or [1], columns=columns, seed=seed, **extents
        )
        if (table := made.call.page_table) is not None:
            for _ in range(drawn.randrange(4)):
                wrong = drawn.choice((-1, made.call.k_cache.shape[0], 2**31 - 1, -(2**31)))
                table[drawn.randrange(batch), drawn.randrange(columns)] = wrong
        made.verify()


def test_many_sequences_are_searched_in_several_steps() -> None:
    drawn = random.Random(0)
    for batch in (31, 32, 33, 1000, 1025, 3000):
        new = [drawn.choice((0, 0, 1, 2)) for _ in range(batch)]
        kernel = spec(replace(PLAIN, dim=32, packed=True, paged=True))
        cases.made(kernel, [1] * batch, new, kv_heads=1, columns=1).verify()


def test_tokens_past_the_last_sequence_are_not_written() -> None:
    for starts in ([0, 0, 0, 0, 0, 0], [0, 1, 1, 2, 4, 6], [3, 4, 5, 6, 7, 8]):
        made = cases.made(spec(replace(PLAIN, packed=True)))
        made.call.cu_seqlens = torch.tensor(starts, dtype=torch.int32)
        made.verify()


@pytest.mark.parametrize("operation", [PLAIN, PAGED], ids=["plain", "paged"])
def test_numbers_that_mean_nothing_lead_to_no_row_outside_of_caches(
    operation: AttentionAppendOperation,
) -> None:
    drawn = torch.Generator().manual_seed(0)
    operation = replace(operation, packed=True)
    for _ in range(20):
        call = cases.made(spec(operation), [0] * 40).call
        other = {name: cases.there(getattr(call, name)) for name in call.__dataclass_fields__}
        for name in ("lengths", "page_table", "cu_seqlens"):
            if other[name] is not None:
                low, high = (-(2**31), 2**31) if name != "lengths" else (-100, 100)
                any_numbers = torch.randint(low, high, other[name].shape, generator=drawn)
                other[name] = any_numbers.to(torch.int32).cuda()
        warploom.append_kv_cache(**other)
        for one in written(AttentionAppendCall(**other)).values():
            room = cases.room(one)
            assert (room[: cases.BESIDE] == room[0]).all()
            assert (room[-cases.BESIDE :] == room[0]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", [E4M3, torch.int8])
def test_every_16_bit_number_is_rounded_as_torch_rounds_it(
    dtype: torch.dtype, cache: torch.dtype
) -> None:
    """NaN, infinities, ties, subnormal numbers, those past the largest."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    rows = bits.view(dtype).view(1, 1, 128, 512)
    for scale in (1.0, 0.37, 64.0):
        found = []
        for device in ("cpu", "cuda"):
            k_cache = torch.zeros(1, 1, 128, 512, device=device).to(cache)
            new, one = rows.to(device), torch.tensor(scale, device=device)
            start = torch.zeros(1, dtype=torch.int32, device=device)
            v_cache = k_cache.clone()
            warploom.append_kv_cache(k_cache, v_cache, new, new, start, scale_k=one, scale_v=one)
            assert torch.equal(k_cache.view(torch.uint8), v_cache.view(torch.uint8))
            found.append(k_cache.cpu().float())
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache", [E4M3, torch.int8])
def test_rows_of_every_size_have_scales_that_they_can_be_divided_by(cache: torch.dtype) -> None:
    """Zeros, the smallest and the largest numbers, infinity and NaN."""
    sizes = torch.tensor([0, 1e-40, 1e-38, 1e-30, 1e-10, 1, 1e30, 3e38, torch.inf, torch.nan])
    rows = (torch.randn(len(sizes), 64) * sizes[:, None]).bfloat16()[None, None]
    found = []
    for device in ("cpu", "cuda"):
        caches = [torch.zeros(1, 1, 10, 64, device=device).to(cache) for _ in range(2)]
        scales = [torch.zeros(1, 1, 10, device=device) for _ in range(2)]
        start = torch.zeros(1, dtype=torch.int32, device=device)
        new = rows.to(device)
        warploom.append_kv_cache(*caches, new, new, start, scale_k=scales[0], scale_v=scales[1])
        found.append((caches[0].cpu().float(), scales[0].cpu()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert found[1][1].isfinite().all() and (found[1][1] > 0).all()


@pytest.mark.usefixtures("memory")
def test_past_2_to_the_31_elements_rows_are_found() -> None:
    pages, page, heads, dim = 2200, 1024, 8, 128  # 2.3e9 numbers of each cache
    k_cache, v_cache = (
        torch.zeros(pages, page, heads, dim, dtype=torch.int8, device="cuda").transpose(1, 2)
        for _ in range(2)
    )
    table = torch.tensor([[0, pages - 1], [7, pages // 2]], dtype=torch.int32, device="cuda")
    k = torch.full((2, heads, 1, dim), 3.0, device="cuda").bfloat16()
    lengths = torch.tensor([2 * page - 1, page + 5], dtype=torch.int32, device="cuda")
    one = torch.ones((), device="cuda")
    warploom.append_kv_cache(
        k_cache, v_cache, k, 2 * k, lengths, page_table=table, scale_k=one, scale_v=one
    )
    for cache, value in ((k_cache, 3), (v_cache, 6)):
        assert (cache[pages - 1, :, page - 1] == value).all()
        assert (cache[pages // 2, :, 5] == value).all()
        flat = cache.transpose(1, 2).view(-1, 1 << 20)
        assert int((flat != 0).sum()) == 2 * heads * dim

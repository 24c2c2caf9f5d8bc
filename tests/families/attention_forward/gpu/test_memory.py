"""Which memory attention reads, writes, copies and leaves alone; where NaN goes and where not."""

from __future__ import annotations

from typing import Any

import attention_arena as arena
import attention_cases as cases
import pytest
import torch
from attention_cases import MASKS, SIMPLE, Shape, operation, short

import warploom
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
BF16 = torch.bfloat16
LENGTH = 517
KERNELS = [SIMPLE["none"], SIMPLE["causal"], SIMPLE["dynamic"], SIMPLE["long"]]
over_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=short)


def masked(kernel: KernelSpec, seq: int = LENGTH) -> arena.Call:
    """A call of a kernel with its mask."""
    causal = operation(kernel).mask == "causal"
    return arena.call(kernel, Shape(2, 4, 2, seq, seq), causal=causal)


def same(found: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal to the bit."""
    return found == clean


# ---- NaN -----------------------------------------------------------------------------------------


@over_kernels
@pytest.mark.parametrize("row", [0, 63, 64, 300, LENGTH - 1])
def test_nan_in_a_query_row_poisons_that_row_only(kernel: KernelSpec, row: int) -> None:
    made = masked(kernel)
    clean = [t.clone() for t in arena.verify(made)]
    made.q.view[1, 2, row, 5] = torch.nan
    out, lse = made.run()
    assert out[1, 2, row].isnan().all()
    assert lse[1, 2, row].isnan()
    out[1, 2, row], lse[1, 2, row] = clean[0][1, 2, row], clean[1][1, 2, row]
    assert same(out, clean[0]).all()
    assert same(lse, clean[1]).all()


@over_kernels
@pytest.mark.parametrize("column", [0, 64, 300, LENGTH - 1])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_in_a_key_reaches_rows_that_attend_to_it_and_at_most_its_tile(
    kernel: KernelSpec, column: int, which: str
) -> None:
    made = masked(kernel)
    clean_out, clean_lse = (t.clone() for t in arena.verify(made))
    getattr(made, which).view[1, 1, column, 3] = torch.nan
    out, lse = made.run()
    causal = operation(kernel).mask == "causal"
    attending = column if causal else 0  # the first row that attends to it
    # Tiles of queries reach at most a tile further; tiles of keys at most one before the column.
    schedule: Any = kernel.schedule
    reach = max(0, attending - schedule.kv_tile - schedule.q_tile) if causal else 0
    poisoned = out[1, 2:4]  # the heads that share kv head 1
    if which == "k":
        assert poisoned[:, attending:].isnan().all()
        assert lse[1, 2:4, attending:].isnan().all()
        poisoned[:, reach:] = clean_out[1, 2:4, reach:]
        lse[1, 2:4, reach:] = clean_lse[1, 2:4, reach:]
    else:
        assert poisoned[:, attending:, 3].isnan().all()
        poisoned[:, reach:, 3] = clean_out[1, 2:4, reach:, 3]
    assert same(out, clean_out).all()
    assert same(lse, clean_lse).all()


@pytest.mark.parametrize("kernel", cases.PACKED, ids=short)
@pytest.mark.parametrize("lengths", [[65, 70, 128], [200, 1, 63], [64, 193, 7]], ids=str)
def test_nan_in_the_next_sequence_leaves_this_one_bit_equal(
    kernel: KernelSpec, lengths: list[int]
) -> None:
    made = arena.packed(kernel, lengths, lengths, **MASKS[operation(kernel).mask][0])
    clean = [t.clone() for t in arena.verify(made)]
    first, second, _ = lengths
    middle = slice(first, first + second)
    for operand in made.given:
        operand[middle] = torch.nan
    out, lse = made.run()
    assert out[middle].isnan().all()
    out[middle], lse[:, middle] = clean[0][middle], clean[1][:, middle]
    assert same(out, clean[0]).all()
    assert same(lse, clean[1]).all()
    assert made.out.untouched_outside()


@pytest.mark.parametrize("kernel", cases.PACKED, ids=short)
def test_rows_past_the_last_sequence_are_neither_read_nor_written(kernel: KernelSpec) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    made = arena.packed(kernel, [65, 63], [63, 100], past=200, **keywords)
    out, _ = arena.verify(made)
    assert (out[-200:].view(torch.int16) == -1).all()


# ---- Views ---------------------------------------------------------------------------------------


def random(*shape: int) -> torch.Tensor:
    """Random numbers in bf16."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(BF16)


VIEWS: dict[str, tuple[Any, int]] = {
    "heads before rows": (lambda: random(2, 4, 130, 64), 0),
    "rows before heads": (lambda: random(2, 130, 4, 64).transpose(1, 2), 0),
    "one of q, k and v together": (lambda: random(2, 130, 3, 4, 64)[:, :, 1].transpose(1, 2), 0),
    "part of a row": (lambda: random(2, 4, 130, 96)[..., 16:80], 0),
    "every other row": (lambda: random(2, 4, 260, 64)[:, :, ::2], 0),
    "one batch": (lambda: random(1, 4, 130, 64), 0),
    "batch inside": (lambda: random(4, 130, 2, 64).permute(2, 0, 1, 3), 0),
    "misaligned base": (lambda: random(2, 4, 130, 96)[..., 4:68], 1),
    "odd pitch": (lambda: random(2, 4, 130, 65)[..., :64], 1),
    "every other column": (lambda: random(2, 4, 130, 128)[..., ::2], 1),
    "dim before rows": (lambda: random(2, 4, 64, 130).transpose(2, 3), 1),
    "one head for all": (lambda: random(2, 1, 130, 64).expand(2, 4, 130, 64), 1),
    "one row for all": (lambda: random(2, 4, 1, 64).expand(2, 4, 130, 64), 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_copied_only_where_tma_cannot_read_it(name: str) -> None:
    make, expected = VIEWS[name]
    view = make()
    plain = random(view.shape[0], 4, 130, 64)
    for given in ((view, plain, plain), (plain, view, plain), (plain, plain, view)):
        for _ in range(2):  # planned by then
            before = warploom.counters.copies
            out, lse = warploom.attention(*given, causal=True, return_lse=True)
            assert warploom.counters.copies - before == expected
        function = Function(64**-0.5, band=Band(right=0, bottom_right=True))
        exact, bound = reference.exact(*given, function), reference.bound(*given, function)
        for what, found, *wanted in zip(("out", "lse"), (out, lse), exact, bound, strict=True):
            arena.assert_within(what, found, *wanted)


def test_the_result_lies_in_memory_as_q_does() -> None:
    q = random(2, 130, 4, 64).transpose(1, 2)
    out = warploom.attention(q, q, q, causal=True)
    assert out.stride() == q.stride()
    assert torch.equal(out, warploom.attention(*[q.contiguous()] * 3, causal=True))


def test_no_plan_keeps_what_a_copy_held() -> None:
    odd, plain = random(2, 4, 130, 65)[..., :64], random(2, 4, 130, 64)
    for value in (1.0, 2.0, 3.0):
        odd.mul_(value)
        expected = warploom.attention(odd.contiguous(), plain, plain)
        assert torch.equal(warploom.attention(odd, plain, plain), expected)


def test_overlap_is_refused_however_often_it_is_tried() -> None:
    room = random(2, 4, 300, 64)
    for _ in range(2):
        with pytest.raises(ProblemError, match="does not overlap"):
            warploom.attention(room[:, :, :200], room, room, out=room[:, :, 100:])


# ---- Size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_64k_tokens_take_memory_for_the_inputs_and_the_outputs(causal: bool) -> None:
    tokens, heads, dim = 65_536, 4, 128
    q, k, v = (random(1, heads, tokens + extra, dim)[:, :, :tokens] for extra in (0, 1, 2))
    warploom.attention(q[:, :, :128], k, v)  # whatever a first call allocates
    warploom.plan_attention(q, k, v, causal=causal)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = warploom.attention(q, k, v, causal=causal, return_lse=True)
    torch.cuda.synchronize()
    results = out.nbytes + lse.nbytes
    assert torch.cuda.max_memory_allocated() - before <= results + tokens * heads * 8 + (1 << 20)
    for first in (0, 12_345, tokens - 65):
        rows = slice(first, first + 65)
        seen = slice(0, first + 65 if causal else tokens)
        band = Band(right=0, bottom_right=True) if causal else Band()
        given = q[:, :, rows], k[:, :, seen], v[:, :, seen]
        function = Function(dim**-0.5, band=band)
        exact, bound = reference.exact(*given, function), reference.bound(*given, function)
        arena.assert_within("out", out[:, :, rows], exact[0], bound[0])
        arena.assert_within("lse", lse[:, :, rows], exact[1], bound[1])


@pytest.mark.parametrize("long", ["q", "k"])
def test_tensors_past_2_to_the_31_elements_are_read_and_written_where_they_are(long: str) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 30 << 30:
        pytest.skip("needs 30 GB of GPU memory")
    heads, tokens, dim = 64, 262_147, 128
    assert heads * tokens * dim > 2**31
    small, large = (torch.empty(1, heads, n, dim, dtype=BF16, device="cuda") for n in (65, tokens))
    for tensor in (small, large):
        tensor.normal_(generator=torch.Generator("cuda").manual_seed(1))
    q, k = (large, small) if long == "q" else (small, large)
    out, lse = warploom.attention(q, k, k, return_lse=True)
    assert out.isfinite().all()
    for head in (0, heads - 1):
        for rows in (slice(0, 65), slice(q.shape[2] - 65, q.shape[2])):
            one = slice(head, head + 1)
            given = q[:, one, rows], k[:, one], k[:, one]
            function = Function(dim**-0.5)
            exact, bound = reference.exact(*given, function), reference.bound(*given, function)
            arena.assert_within("out", out[:, one, rows], exact[0], bound[0])
            arena.assert_within("lse", lse[:, one, rows], exact[1], bound[1])

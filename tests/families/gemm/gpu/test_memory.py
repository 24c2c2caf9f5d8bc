"""Which memory a call reads, writes, copies and leaves alone."""

from __future__ import annotations

import math
from typing import Any

import gemm_arena as arena
import gemm_cases as cases
import pytest
import torch
from gemm_arena import guarded
from gemm_cases import SIMPLE
from rooms import Guarded

import warploom
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
BF16 = torch.bfloat16


def copies_of(a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> int:
    """Run a call that the table chooses for, check its result, and return how much it copied."""
    before = warploom.counters.copies
    d = warploom.gemm(a, b, **keywords)
    copied = warploom.counters.copies - before
    flat = a.reshape(-1, a.shape[-1])
    bound = reference.gemm_bound(flat, b, [], d.dtype)
    arena.assert_within(d.reshape(flat.shape[0], b.shape[1]), *bound)
    return copied


def filled(rows: int, columns: int, *, dtype: torch.dtype = BF16, **keywords: Any) -> Guarded:
    """A guarded view of random numbers."""
    made = guarded(rows, columns, dtype, **keywords)
    arena.fill(made.view, torch.Generator("cuda").manual_seed(rows + columns))
    return made


@pytest.mark.parametrize("n", [131, 4, 1, 132, 250])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_store_of_16_bytes_never_reaches_the_columns_beside_d(n: int, dtype: torch.dtype) -> None:
    a, b = filled(257, 193), filled(193, n, layout="col")
    d = guarded(257, n, dtype)  # base and pitch would do for TMA: only the end of a row does not
    assert copies_of(a.view, b.view, out=d.view) == 0
    assert d.untouched_outside()


@pytest.mark.parametrize("layout_a", ["row", "col"])
@pytest.mark.parametrize("layout_b", ["row", "col"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_16_bit_operands_are_read_in_place_in_every_layout(
    layout_a: str, layout_b: str, dtype: torch.dtype
) -> None:
    a = filled(257, 193, dtype=dtype, layout=layout_a)
    b = filled(193, 136, dtype=dtype, layout=layout_b)
    assert copies_of(a.view, b.view) == 0


def test_8_bit_operands_are_copied_only_in_the_layout_that_wgmma_cannot_read() -> None:
    int8: dict[str, Any] = {"dtype": torch.int8}
    rows, columns = filled(257, 193, **int8).view, filled(257, 193, layout="col", **int8).view
    right, wrong = filled(193, 136, layout="col", **int8).view, filled(193, 136, **int8).view
    assert copies_of(rows, right) == 0
    assert copies_of(columns, right) == 1
    assert copies_of(rows, wrong) == 1
    assert copies_of(columns, wrong) == 2


VIEWS: dict[str, tuple[Any, int]] = {
    "misaligned base": (lambda: filled(257, 201).view[:, 4:197], 1),
    "base at the next 16 bytes": (lambda: filled(257, 201).view[:, 8:201], 0),
    "odd pitch": (lambda: filled(257, 193, odd=True).view, 1),
    "every other row": (lambda: filled(514, 193).view[::2], 0),
    "every other column": (lambda: filled(257, 386).view[:, ::2], 1),
    "one row": (lambda: filled(1, 193).view, 0),
    "one row for all": (lambda: filled(1, 193).view.expand(257, 193), 1),
    "one number for all": (lambda: filled(1, 1).view.expand(257, 193), 1),
    "batch in one piece": (lambda: filled(6 * 43, 193).view.unflatten(0, (2, 3, 43)), 0),
    "batch with gaps": (lambda: filled(2 * 50, 193).view.unflatten(0, (2, 50))[:, :43], 1),
    "batch inside": (lambda: filled(43, 2 * 200).view.unflatten(1, (2, 200)).transpose(0, 1), 1),
    "batch expanded": (lambda: filled(43, 193).view.expand(3, 43, 193), 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_copied_only_where_tma_cannot_read_it(name: str) -> None:
    make, expected = VIEWS[name]
    a = make()
    b = filled(a.shape[-1], 131, layout="col")
    assert copies_of(a, b.view) == expected
    assert copies_of(a, b.view) == expected  # planned by now


def test_a_batch_is_written_to_a_batch() -> None:
    a, b = filled(6 * 43, 193).view.unflatten(0, (2, 3, 43)), filled(193, 131, layout="col")
    out = torch.full((2, 3, 43, 131), torch.nan, dtype=BF16, device="cuda")
    assert warploom.gemm(a, b.view, out=out) is out
    bound = reference.gemm_bound(a.reshape(-1, 193), b.view, [], BF16)
    arena.assert_within(out.reshape(-1, 131), *bound)


@pytest.mark.parametrize("beta", [0.0, -0.75])
@pytest.mark.parametrize("kernel", ["residual", "residual direct"])
def test_beta_0_never_reads_c(kernel: str, beta: float) -> None:
    made = arena.call(SIMPLE[kernel], *cases.fitting((257, 131, 193), SIMPLE[kernel]))
    made.listed[0][1].fill_(torch.nan)
    made.listed = [("residual", made.listed[0][1], beta)]
    if beta:
        assert made.run().isnan().all()
    else:
        arena.verify(made)


@pytest.mark.parametrize("kernel", ["residual", "residual direct"])
@pytest.mark.parametrize("shape", [(257, 131, 193), (3001, 2003, 129)], ids=str)
def test_d_may_be_c_itself(kernel: str, shape: tuple[int, int, int]) -> None:
    made = arena.call(SIMPLE[kernel], *cases.fitting(shape, SIMPLE[kernel]))
    expected = arena.verify(made).clone()
    made.d.view.copy_(made.listed[0][1])
    made.listed = [("residual", made.d.view, -0.75)]
    assert torch.equal(made.run(), expected)
    assert made.d.untouched_outside()


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("kernel", ["tma", "direct", "relu"])
@pytest.mark.parametrize("place", [(0, 0), (128, 63), (255, 192), (256, 191)], ids=str)
def test_what_is_not_finite_stays_in_its_row_and_its_column(
    kernel: str, value: float, place: tuple[int, int]
) -> None:
    made = arena.call(SIMPLE[kernel], 257, 264, 193)
    clean = arena.verify(made).clone()
    row, column = place
    for operand, index in ((made.a.view, (row, column)), (made.b.view, (column, row))):
        kept = operand[index].clone()
        operand[index] = value
        d = made.run()
        affected = d[row] if operand is made.a.view else d[:, row]
        if math.isnan(value):
            assert affected.isnan().all()
        elif kernel == "relu":
            assert affected.isposinf().any()
        else:
            assert not affected.isfinite().any()
        affected.copy_(clean[row] if operand is made.a.view else clean[:, row])
        assert torch.equal(d, clean)
        operand[index] = kept


@pytest.mark.parametrize("m", [1, 2, 8, 9, 31, 64, 65, 127])
@pytest.mark.parametrize("kernel", cases.SCHEDULES, ids=cases.short)
def test_rows_that_are_not_loaded_are_not_stored(kernel: KernelSpec, m: int) -> None:
    before = arena.call(kernel, *cases.fitting((257, 131, 520), kernel))
    if before.a.view.is_floating_point():
        before.a.view.fill_(torch.nan)  # and so shared memory, for a while
    before.run()
    arena.verify(arena.call(kernel, *cases.fitting((m, 131, 193), kernel)))


def test_nan_in_an_epilogue_operand_stays_in_its_column_or_element() -> None:
    made = arena.call(SIMPLE["layer"], 257, 136, 193)  # scale, bias, gelu_tanh, residual
    clean = arena.verify(made).clone()
    bias, residual = made.listed[1][1], made.listed[3][1]
    bias[135] = residual[256, 7] = torch.nan
    d = made.run()
    assert d[:, 135].isnan().all()
    assert d[256, 7].isnan()
    d[:, 135], d[256, 7] = clean[:, 135], clean[256, 7]
    assert torch.equal(d, clean)


def test_an_extended_residual_is_read_as_the_rows_that_it_stands_for() -> None:
    made = arena.call(SIMPLE["residual"], 257, 136, 193)
    row = made.listed[0][1][:1]
    made.listed = [("residual", row.expand(257, 136), 0.5)]
    made.operands = []
    arena.verify(made)


def test_operands_on_two_devices_are_refused_before_a_launch() -> None:
    a, b, d = filled(5, 16).view, filled(16, 8).view, guarded(5, 8, BF16).view
    launches = warploom.counters.launches
    wrong: list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]] = [
        ((a.cpu(), b), {}),
        ((a, b.cpu()), {}),
        ((a, b), {"out": d.cpu()}),
        ((a, b), {"bias": torch.zeros(8)}),
        ((a, b), {"residual": torch.zeros(5, 8)}),
        ((a, b), {"scale_a": torch.zeros(5)}),
        ((a, b), {"scale_a": torch.zeros(1)}),
    ]
    for operands, keywords in wrong:
        with pytest.raises(ProblemError, match="device"):
            warploom.gemm(*operands, **keywords)
    assert warploom.counters.launches == launches


def test_overlap_is_refused_however_often_it_is_tried() -> None:
    room = filled(300, 264).view
    b = filled(264, 264).view
    for _ in range(2):
        with pytest.raises(ProblemError, match="do not overlap"):
            warploom.gemm(room[:257], b, out=room[43:])
        with pytest.raises(ProblemError, match="finite"):
            warploom.gemm(room[:257], b, residual=room[:257], beta=float("nan"))


def test_no_plan_keeps_what_a_copy_or_a_scale_held() -> None:
    a, b = filled(257, 193, odd=True).view, filled(193, 136, layout="col").view
    scale = torch.ones((), device="cuda")
    for value in (1.0, 2.0, 3.0):
        a.mul_(value)
        scale.fill_(value)
        d = warploom.gemm(a, b, scale_a=scale, scale_b=value)
        bound = reference.gemm_bound(a, b, [("scale", value * value)], d.dtype)
        arena.assert_within(d, *bound)

"""Which memory a call reads, writes, copies and leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import mixed_arena as arena
import mixed_cases as cases
import pytest
import torch
from mixed_cases import SIMPLE, short
from product_arena import fill, guarded

import warploom
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.mixed_gemm import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
BF16 = torch.bfloat16
N, K = 136, 256
WAYS = ("few", "some", "many", "split", "shared")


def filled(rows: int, columns: int, *, odd: bool = False) -> torch.Tensor:
    made = guarded(rows, columns, BF16, odd=odd).view
    fill(made, torch.Generator("cuda").manual_seed(rows + columns))
    return made


VIEWS: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "misaligned base": (lambda: filled(43, K + 8)[:, 4 : K + 4], 1),
    "base at the next 16 bytes": (lambda: filled(43, K + 8)[:, 8:], 0),
    "odd pitch": (lambda: filled(43, K, odd=True), 1),
    "every other row": (lambda: filled(86, K)[::2], 0),
    "every other column": (lambda: filled(43, 2 * K)[:, ::2], 1),
    "one row": (lambda: filled(1, K), 0),
    "one row for all": (lambda: filled(1, K).expand(17, K), 1),
    "rows apart by another matrix": (lambda: filled(43, 3 * K)[:, K : 2 * K], 0),
    "batch in one piece": (lambda: filled(6 * 43, K).unflatten(0, (2, 3, 43)), 0),
    "batch with gaps": (lambda: filled(2 * 50, K).unflatten(0, (2, 50))[:, :43], 1),
    "turned": (lambda: filled(K, 48).t(), 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_activations_are_copied_only_where_tma_cannot_read_them(name: str) -> None:
    make, expected = VIEWS[name]
    a, packed = make(), arena.weight(cases.operation(), N, K).packed
    for _ in range(2):  # the second is planned
        before = warploom.counters.copies
        d = warploom.mixed_gemm(a, packed)
        assert warploom.counters.copies - before == expected
        assert reference.error_share(d.reshape(-1, N), a.reshape(-1, K), packed) <= 1


@pytest.mark.parametrize("n", [131, 4, 1, 132, 250])
def test_a_store_of_16_bytes_never_reaches_the_columns_beside_d(n: int) -> None:
    a, packed = filled(43, K), arena.weight(cases.operation(), n, K).packed
    d = guarded(43, n, BF16)  # base and pitch would do for TMA: only the end of a row does not
    warploom.mixed_gemm(a, packed, out=d.view)
    assert reference.error_share(d.view, a, packed) <= 1
    assert d.untouched_outside()


def test_a_batch_is_written_to_a_batch() -> None:
    a, packed = filled(6 * 43, K).unflatten(0, (2, 3, 43)), arena.weight(cases.operation(), N, K)
    out = torch.full((2, 3, 43, N), torch.nan, dtype=BF16, device="cuda")
    assert warploom.mixed_gemm(a, packed.packed, out=out) is out
    assert reference.error_share(out.reshape(-1, N), a.reshape(-1, K), packed.packed) <= 1


@pytest.mark.parametrize("rows", [(0,), (3, 0), (0, 5)], ids=str)
def test_no_row_is_no_launch(rows: tuple[int, ...]) -> None:
    packed = arena.weight(cases.operation(), N, K).packed
    before = warploom.counters.launches
    d = warploom.mixed_gemm(torch.empty(*rows, K, dtype=BF16, device="cuda"), packed)
    assert d.shape == (*rows, N) and warploom.counters.launches == before


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("place", [(0, 0), (17, 255), (36, 100)], ids=str)
def test_what_is_not_finite_stays_in_its_row(
    name: str, value: float, place: tuple[int, int]
) -> None:
    made = arena.call(SIMPLE[name], 37, N, K)
    clean = arena.verify(made).clone()
    made.a.view[place] = value
    d, row = made.run(), place[0]
    assert not d[row].isfinite().any()
    d[row] = clean[row]
    assert torch.equal(d, clean)


@pytest.mark.parametrize("kernel", cases.SCHEDULES, ids=short)
def test_rows_that_are_not_loaded_are_not_stored(kernel: KernelSpec) -> None:
    before = arena.call(kernel, *cases.fitting((257, 131, 520), kernel))
    for m in (1, 8, 9, 31, 65):
        if before.a.view.is_floating_point():
            before.a.view.fill_(torch.nan)  # and so shared memory, for a while
        before.run()
        arena.verify(arena.call(kernel, *cases.fitting((m, 131, 193), kernel)))


@pytest.mark.parametrize("beta", [0.0, -0.75])
def test_beta_0_never_reads_c(beta: float) -> None:
    made = arena.call(SIMPLE["residual"], 43, N, K)
    made.listed[0][1].fill_(torch.nan)
    made.listed = [("residual", made.listed[0][1], beta)]
    if beta:
        assert made.run().isnan().all()
    else:
        arena.verify(made)


def test_d_may_be_c_itself() -> None:
    made = arena.call(SIMPLE["residual"], 300, 1000, K)
    expected = arena.verify(made).clone()
    made.d.view.copy_(made.listed[0][1])
    made.listed = [("residual", made.d.view, -0.75)]
    assert torch.equal(made.run(), expected)
    assert made.d.untouched_outside()


def test_nan_in_an_epilogue_operand_stays_in_its_column_or_element() -> None:
    made = arena.call(SIMPLE["layer"], 43, N, K)  # scale, bias, gelu_tanh, residual
    clean = arena.verify(made).clone()
    bias, residual = made.listed[1][1], made.listed[3][1]
    bias[N - 1] = residual[42, 7] = torch.nan
    d = made.run()
    assert d[:, N - 1].isnan().all() and d[42, 7].isnan()
    d[:, N - 1], d[42, 7] = clean[:, N - 1], clean[42, 7]
    assert torch.equal(d, clean)


def test_a_weight_that_is_on_the_host_or_misaligned_is_refused_before_a_launch() -> None:
    a, packed = filled(5, K), arena.weight(cases.operation(), N, K).packed
    warploom.mixed_gemm(a, packed)  # planned by now
    launches = warploom.counters.launches
    with pytest.raises(ProblemError, match="device"):
        warploom.mixed_gemm(a, packed.to("cpu"))
    room = torch.zeros(packed.data.numel() + 8, dtype=torch.uint8, device="cuda")
    moved = type(packed)(room[8:].view(packed.data.shape), packed.metadata)
    for _ in range(2):
        with pytest.raises(ProblemError, match="16 bytes"):
            warploom.mixed_gemm(a, moved)
    assert warploom.counters.launches == launches

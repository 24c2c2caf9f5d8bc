"""Which memory is read, written, copied and left alone; where NaN goes and where not."""

from __future__ import annotations

from collections.abc import Callable

import activation_backward_cases as cases
import pytest
import torch
from activation_backward_cases import short
from rooms import assert_repeats

import warploom
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.activation_backward.api import activation_backward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_kernels = pytest.mark.parametrize("kernel", cases.SMOKE, ids=short)


@over_kernels
@pytest.mark.parametrize("pad", [1, 8, 13])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rows_of_any_pitch_and_address_are_read_and_written_in_place(
    kernel: KernelSpec, pad: int, shift: int
) -> None:
    for m, n in ((130, 200), (67, 1000)):
        cases.made(kernel, m, n, pad=pad, shift=shift).verify()


@over_kernels
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    for m, n in ((3001, 520), (70, 136)):
        made = cases.made(kernel, m, n)
        wanted = [one.clone() for one in made.verify()]
        assert_repeats(made.run, wanted, made.guarded(), runs=200)


@over_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_its_element_and_the_sum_of_its_column(
    kernel: KernelSpec, value: float
) -> None:
    made = cases.made(kernel, 300, 264)
    clean = [one.clone() for one in made.verify()]
    row, column = 171, 259
    if made.call.z is not None:
        made.call.z[row, column] = 1.0  # no slope of 0 there
    made.call.dy[row, column] = value
    for found, before in zip(made.run(), clean, strict=True):
        place = (row, column) if found.dim() == 2 else (column,)
        assert not found[place].isfinite()
        found[place] = before[place]
        assert torch.equal(found, before)


VIEWS: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "dense": (lambda: torch.randn(4, 66, 72, device="cuda"), 0),
    "part of a row": (lambda: torch.randn(4, 66, 99, device="cuda")[..., 5:77], 0),
    "every other row": (lambda: torch.randn(4, 132, 72, device="cuda")[:, ::2], 0),
    "batches apart": (lambda: torch.randn(4, 70, 72, device="cuda")[:, :66], 1),
    "columns before rows": (lambda: torch.randn(4, 72, 66, device="cuda").mT, 1),
    "one row for all": (lambda: torch.randn(1, 1, 72, device="cuda").expand(4, 66, 72), 0),
    "one number for all": (lambda: torch.randn(1, 1, 1, device="cuda").expand(4, 66, 72), 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_copied_only_where_no_pitch_leads_through_its_rows(name: str) -> None:
    make, copies = VIEWS[name]
    view, other = make(), torch.randn(4, 66, 72, device="cuda")
    for given in ((view, other), (other, view)):
        expected = activation_backward(*(one.contiguous() for one in given), "silu", sums=True)
        for _ in range(2):
            before = warploom.counters.copies
            found = activation_backward(*given, "silu", sums=True)
            assert warploom.counters.copies - before == copies
            for one, wanted in zip(found, expected, strict=True):
                assert one is not None and wanted is not None and torch.equal(one, wanted)


def test_overlap_is_refused_however_often_it_is_tried() -> None:
    room = torch.randn(300, 64, device="cuda")
    for _ in range(2):
        with pytest.raises(ProblemError, match="do not overlap"):
            activation_backward(room[:200], room[:200].clone(), "gelu", out=room[100:])


def test_empty_tensors_launch_nothing_and_have_sums_of_0() -> None:
    before = warploom.counters.launches
    for shape in ((0, 64), (5, 0), (2, 0, 64), (0,)):
        dy = torch.empty(shape, device="cuda").bfloat16()
        dz, sums = activation_backward(dy, dy.clone(), "gelu", sums=True)
        assert dz is not None and sums is not None and dz.shape == dy.shape
        assert torch.equal(sums, torch.zeros(shape[-1], device="cuda"))
    assert warploom.counters.launches == before


@pytest.mark.usefixtures("memory")
def test_past_2_to_the_31_elements_rows_are_found() -> None:
    m, n = 70_001, 32_768
    dy = torch.ones(1, n, device="cuda").bfloat16().expand(m, n).contiguous()
    dy[-1] = 2.0
    _, sums = activation_backward(dy, sums=True)
    assert sums is not None
    assert (sums == m + 1).all()
    dz, _ = activation_backward(dy, dy, "relu")
    assert dz is not None and torch.equal(dz[-1], dy[-1]) and torch.equal(dz[0], dy[0])


@pytest.mark.parametrize("m,n", [(2**31, 1), (2**31 - 1, 8)])
def test_more_than_32_bits_count_is_refused(m: int, n: int) -> None:
    plan.forget()
    dy = torch.ones(1, 1, device="cuda").expand(m, n)
    with pytest.raises(ProblemError, match="must be smaller: kernels count to"):
        activation_backward(dy, sums=True)

"""Batches are read where they lie: none takes another's place, none is copied needlessly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom
from warploom.generator.families._product import Batches
from warploom.runtime.families._product.operands import (
    Copy,
    batches,
    broadcast,
    stacked,
    step_pitch,
)
from warploom.runtime.families.gemm.call import GemmCall

BF16 = torch.bfloat16
Shape = tuple[int, ...]


def stack(*batches: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Matrices [*batches, 8, 16], 128 elements each."""
    return torch.zeros(*batches, 8, 16, dtype=dtype)


# A tensor, the batches of D, and how it lies in them.
IN_PLACE: dict[str, tuple[torch.Tensor, Shape, Batches]] = {
    "no batches": (stack(), (), Batches()),
    "no batches of its own": (stack(), (3,), Batches()),
    "a single batch": (stack(1), (3,), Batches()),
    "a batch each": (stack(3), (3,), Batches(3, 128)),
    "two dimensions in a row": (stack(2, 3), (2, 3), Batches(6, 128)),
    "transposed matrices": (stack(3).mT, (3,), Batches(3, 128)),
    "repeated in a row": (stack(2, 1), (2, 3), Batches(2, 128, 3)),
    "repeated in two dimensions": (stack(2, 1, 1), (2, 3, 5), Batches(2, 128, 15)),
    "wrapped around": (stack(3), (2, 3), Batches(3, 128)),
    "repeated and wrapped around": (stack(3, 1), (2, 3, 5), Batches(3, 128, 5)),
    "expanded": (stack(1).expand(3, 8, 16), (3,), Batches()),
    "expanded on the fast side": (stack(2, 1).expand(2, 3, 8, 16), (2, 3), Batches(2, 128, 3)),
    "expanded on the slow side": (stack(1, 3).expand(2, 3, 8, 16), (2, 3), Batches(3, 128)),
    "every other": (stack(6)[::2], (3,), Batches(3, 256)),
    "heads beside each other": (
        torch.zeros(8, 3, 16, dtype=BF16).transpose(0, 1),
        (3,),
        Batches(3, 16),
    ),
    "extents of 1 between": (stack(2, 1, 3), (2, 1, 3), Batches(6, 128)),
}
NOT_IN_PLACE: dict[str, tuple[torch.Tensor, Shape]] = {
    "broadcast in the middle": (stack(2, 1, 3), (2, 5, 3)),
    "expanded in the middle": (stack(2, 1, 3).expand(2, 5, 3, 8, 16), (2, 5, 3)),
    "dimensions in another order": (stack(3, 2).transpose(0, 1), (2, 3)),
    "a gap after each three": (stack(2, 4)[:, :3], (2, 3)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_batches_one_pitch_apart_are_read_in_place(name: str) -> None:
    tensor, shape, expected = IN_PLACE[name]
    assert batches(tensor, shape) == expected
    assert places(expected, shape) == true_places(tensor, shape)


@pytest.mark.parametrize("name", NOT_IN_PLACE)
def test_batches_that_no_one_pitch_leads_through_are_not(name: str) -> None:
    tensor, shape = NOT_IN_PLACE[name]
    assert batches(tensor, shape) is None
    copied = stacked(tensor, shape).contiguous()
    found = batches(copied, shape)
    assert found is not None
    assert places(found, shape) == true_places(copied, shape)


def test_a_copy_has_an_expanded_batch_once_where_that_will_do() -> None:
    assert stacked(stack(2, 1).expand(2, 3, 8, 16), (2, 3)).shape == (2, 1, 8, 16)
    assert stacked(stack(1).expand(64, 8, 16), (64,)).shape == (1, 8, 16)
    assert stacked(stack(2, 1, 3), (2, 5, 3)).shape == (2, 5, 3, 8, 16)


@pytest.mark.parametrize(
    ("operand", "shape", "trailing", "expected"),
    [
        (torch.zeros(7), (2, 3), 1, 0),
        (torch.zeros(1, 1, 7), (2, 3), 1, 0),
        (torch.zeros(2, 3, 7), (2, 3), 1, 7),
        (torch.zeros(2, 3, 8)[..., :7], (2, 3), 1, 8),
        (torch.zeros(2, 1, 7), (2, 3), 1, None),
        (torch.zeros(3, 7), (2, 3), 1, None),
        (torch.zeros(3, 2, 7).transpose(0, 1), (2, 3), 1, None),
        (torch.zeros(6, 5, 7), (6,), 2, 35),
    ],
)
def test_a_step_has_every_batch_or_none(
    operand: torch.Tensor, shape: Shape, trailing: int, expected: int | None
) -> None:
    assert step_pitch(operand, shape, trailing) == expected


def places(lie: Batches, shape: Shape) -> list[int]:
    """Where the kernel looks for each batch of D."""
    return [index // lie.repeat % lie.count * lie.pitch for index in range(prod(shape))]


def true_places(tensor: torch.Tensor, shape: Shape) -> list[int]:
    """Where each batch of D has its operand, by torch's broadcasting."""
    strides = tensor.expand(*shape, *tensor.shape[-2:]).stride()[: len(shape)]
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in product(*map(range, shape))
    ]


# ---- Calls, against torch.matmul ----------------------------------------------------------------


def integers(*shape: int) -> torch.Tensor:
    """Small integers in bf16: their products and sums are exact, in whatever order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(BF16)


def assert_equals_matmul(a: torch.Tensor, b: torch.Tensor) -> None:
    expected = torch.matmul(a.float(), b.float())
    made = warploom.gemm(a, b, out_dtype=torch.float32)
    assert made.shape == expected.shape
    assert torch.equal(made, expected)


A5, B7 = integers(5, 16), integers(16, 7)
CALLS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "a batch each": (integers(3, 5, 16), integers(3, 16, 7)),
    "one a for all": (A5, integers(3, 16, 7)),
    "one b for all": (integers(3, 5, 16), B7),
    "one b of one batch for all": (integers(3, 5, 16), integers(1, 16, 7)),
    "an outer product of batches": (integers(2, 1, 5, 16), integers(1, 3, 16, 7)),
    "batches of the other only": (integers(3, 5, 16), integers(2, 1, 16, 7)),
    "in the middle": (integers(2, 1, 3, 5, 16), integers(2, 2, 3, 16, 7)),
    "expanded": (A5.expand(3, 5, 16), integers(3, 16, 7)),
    "both expanded": (A5.expand(3, 5, 16), B7.expand(3, 16, 7)),
    "transposed matrices": (integers(3, 16, 5).mT, integers(3, 7, 16).mT),
    "transposed batches": (integers(3, 2, 5, 16).transpose(0, 1), integers(2, 3, 16, 7)),
    "heads beside each other": (
        integers(5, 3, 16).transpose(0, 1),
        integers(16, 3, 7).transpose(0, 1),
    ),
    "one row each": (integers(3, 1, 16), integers(3, 16, 7)),
    "one column each": (integers(3, 5, 16), integers(3, 16, 1)),
    "one product each": (integers(3, 5, 1), integers(3, 1, 7)),
    "no products": (integers(3, 5, 0), integers(3, 0, 7)),
    "no rows": (integers(3, 0, 16), integers(3, 16, 7)),
    "no columns": (integers(3, 5, 16), integers(3, 16, 0)),
    "no batches": (integers(0, 5, 16), integers(0, 16, 7)),
    "no batches, of one": (integers(1, 5, 16), integers(0, 16, 7)),
    "none in a dimension": (integers(2, 0, 5, 16), integers(2, 0, 16, 7)),
    "nothing at all": (integers(0, 0, 0), integers(0, 0, 0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_batches_mean_what_they_mean_to_torch(name: str) -> None:
    assert_equals_matmul(*CALLS[name])


@st.composite
def operands(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors whose batches broadcast: permuted, expanded, transposed, dimensions left out."""
    shared = draw(st.lists(st.integers(1, 3), max_size=4))
    m, n, k = (draw(st.sampled_from((1, 5, 8, 16))) for _ in range(3))
    return draw(views(shared, m, k)), draw(views(shared, k, n))


@st.composite
def views(draw: st.DrawFn, shared: Sequence[int], rows: int, columns: int) -> torch.Tensor:
    own = [extent if draw(st.booleans()) else 1 for extent in shared]
    own = own[draw(st.integers(0, len(own))) if draw(st.booleans()) else 0 :]
    order = draw(st.permutations(range(len(own))))
    transposed = draw(st.booleans())
    last = (columns, rows) if transposed else (rows, columns)
    room = integers(*(own[i] for i in order), *last)
    view = room.permute(*map(order.index, range(len(own))), len(own), len(own) + 1)
    view = view.mT if transposed else view
    return view.expand(*shared, rows, columns) if draw(st.booleans()) else view


@settings(deadline=None, max_examples=200)
@given(operands())
def test_any_two_tensors_that_broadcast_are_multiplied_batch_by_batch(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    assert_equals_matmul(*pair)
    checked = GemmCall(*pair).checked()
    if not checked.operation.batched:
        return
    shape = broadcast(*pair)
    problem = checked.problem
    operands: tuple[tuple[torch.Tensor, Copy | None, Batches], ...] = (
        (pair[0], checked.operands["a"].copy, problem.batches_a),
        (pair[1], checked.operands["b"].copy, problem.batches_b),
    )
    for operand, copy, lie in operands:
        read = copy(operand) if copy else operand
        assert places(lie, shape) == true_places(read, shape)
        assert lie.count == 1 or lie.pitch * 2 % 16 == 0

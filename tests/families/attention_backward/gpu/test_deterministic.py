"""Gradients that are bit-equal from run to run: every kernel, in both orders of its kv tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_backward_cases import LENGTHS, MANY_TILES, SIMPLE, operation, short
from attention_cases import MASKS, SHAPES, Shape
from rooms import assert_repeats

from warploom.generator.families.attention_backward import order as kv_order
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built", "order")]
FEW = [Shape(2, 4, 2, 257, 193), SHAPES["few rows"], SHAPES["few columns"]]


@pytest.fixture(params=["leftward", "rightward"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kv tiles of a bounded mask add to dq in this order, however many there are."""
    rounds = 0 if request.param == "leftward" else math.inf
    monkeypatch.setattr(kv_order, "LEFTWARD_ROUNDS", rounds)
    plan.forget()
    yield
    plan.forget()


@pytest.mark.parametrize("kernel", [*cases.DETERMINISTIC, *cases.DETERMINISTIC_PAIRS], ids=short)
def test_a_deterministic_kernel_is_right_too(kernel: KernelSpec) -> None:
    for keywords in MASKS[operation(kernel).mask]:
        if operation(kernel).lengths == "packed":
            for lengths in LENGTHS.values():
                arena.verify(arena.packed(kernel, *lengths, past=5, **keywords))
        else:
            for shape in (*FEW, MANY_TILES):
                arena.verify(arena.make(kernel, shape, **keywords))


DETERMINISTIC = [
    *(kernel for kernel in cases.DETERMINISTIC if operation(kernel).dim in (64, 128, 256)),
    *cases.DETERMINISTIC_CLUSTERS,
    *cases.DETERMINISTIC_PAIRS,
    SIMPLE["deterministic, packed"],
]


@pytest.mark.parametrize("kernel", DETERMINISTIC, ids=short)
def test_a_deterministic_kernel_is_bit_equal_over_1000_runs_beside_another_kernel(
    kernel: KernelSpec,
) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    if operation(kernel).lengths == "packed":
        made = arena.packed(kernel, [131, 1, 70], [1030, 5, 700], **keywords)
    else:
        made = arena.make(kernel, MANY_TILES, **keywords)
    wanted = arena.clones(arena.verify(made))
    assert_repeats(made.run, wanted, made.gradients)


def test_two_streams_come_to_the_same_bits() -> None:
    passes = [arena.make(SIMPLE["deterministic"], MANY_TILES, causal="bottom_right") for _ in "12"]
    wanted = arena.clones(arena.verify(passes[0]))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    differing = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for _ in range(500):
        for stream, made, count in zip(streams, passes, differing, strict=True):
            with torch.cuda.stream(stream):
                for one, first in zip(made.run(), wanted, strict=True):
                    count += (one != first).sum()
    torch.cuda.synchronize()
    assert [count.item() for count in differing] == [0, 0]

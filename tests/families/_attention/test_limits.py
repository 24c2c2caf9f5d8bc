"""From which lengths on attention and its gradients are refused, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edges import H200, assert_edge

from warploom.errors import ProblemError
from warploom.generator.families import family
from warploom.generator.families._attention import UNBOUNDED
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardProblem,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import (
    AttentionOperation,
    AttentionProblem,
    AttentionSchedule,
)
from warploom.generator.limits import LARGEST
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.families._attention.mask import Band, shape
from warploom.runtime.families._attention.problem import Extents

LINE = (64, 64, 64)
FORWARD = AttentionProblem(1, 1, 1, 8, 8, 64, 8, 8, LINE, LINE, LINE, LINE)
BACKWARD = AttentionBackwardProblem(
    1, 1, 1, 8, 8, 64, 8, 8, LINE, LINE, LINE, LINE,
    strides_do=LINE, strides_dq=LINE, strides_dk=LINE, strides_dv=LINE,
)  # fmt: skip


def forward(scheduler: str = "static", **operation: Any) -> KernelSpec:
    schedule = AttentionSchedule(128, 96, scheduler=scheduler)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", AttentionOperation("bf16", 64, **operation), schedule)


def backward(dim: int = 64, **operation: Any) -> KernelSpec:
    wanted = AttentionBackwardOperation("bf16", dim, **operation)
    return KernelSpec("sm_90a", wanted, AttentionBackwardSchedule(64, 128, 1, overlap=False))


PASSES = [
    pytest.param(forward, FORWARD, 128 + 96, id="forward"),
    pytest.param(backward, BACKWARD, 64 + 128, id="backward"),
]


@pytest.mark.parametrize(("kernel", "problem", "beside"), PASSES)
@pytest.mark.parametrize("field", ["seq_q", "seq_k"])
def test_a_length_leaves_room_for_tiles(
    kernel: Callable[..., KernelSpec], problem: AttentionProblem, beside: int, field: str
) -> None:
    assert_edge(kernel(), problem, field, LARGEST - beside)


@pytest.mark.parametrize(("kernel", "problem", "beside"), PASSES)
def test_a_length_leaves_room_for_what_is_added_to_it(
    kernel: Callable[..., KernelSpec], problem: AttentionProblem, beside: int
) -> None:
    spec = kernel(mask="window")
    near = replace(problem, left=1000, right=70)
    assert_edge(spec, near, "seq_q", LARGEST - beside - 70)
    assert_edge(spec, near, "seq_k", LARGEST - beside - 1000)
    far = replace(problem, left=-500, right=-300)  # rows far below the diagonal, or above it
    assert_edge(spec, far, "seq_q", LARGEST - beside - 500)
    assert_edge(spec, far, "seq_k", LARGEST - beside - 300)
    causal = replace(problem, right=0)  # its left is no bound, and is not added
    assert causal.left == UNBOUNDED
    assert_edge(kernel(mask="causal"), causal, "seq_k", LARGEST - beside)


@pytest.mark.parametrize(("kernel", "problem", "beside"), PASSES)
@pytest.mark.parametrize("field", ["total_q", "total_k"])
@pytest.mark.parametrize("mask", ["none", "window"])
def test_packed_totals_stay_below_2_to_the_30(
    kernel: Callable[..., KernelSpec], problem: AttentionProblem, beside: int, field: str, mask: str
) -> None:
    """Coordinates of packed tensor maps count from 2^30."""
    assert_edge(kernel(mask=mask, lengths="packed"), problem, field, 2**30 - 1 - beside)


@pytest.mark.parametrize(
    ("kernel", "problem", "tile"), [(forward, FORWARD, 128), (backward, BACKWARD, 128)]
)
def test_packed_sequences_are_counted_by_the_tiles_that_they_may_need(
    kernel: Callable[..., KernelSpec], problem: AttentionProblem, tile: int
) -> None:
    largest = LARGEST // tile - (kernel is backward)  # what follows the last has one, too
    said = f"{LARGEST // tile + 1} tiles of {tile} "
    assert_edge(kernel(lengths="packed"), problem, "batch", largest, said)


@pytest.mark.parametrize("scheduler", ["single", "static", "dynamic"])
def test_tiles_of_all_heads_are_counted(scheduler: str) -> None:
    edge = (LARGEST - 132) // 2
    said = f"{edge + 1} heads of 1 tiles"
    assert_edge(forward(scheduler), FORWARD, "batch", edge, said)
    assert_edge(backward(), BACKWARD, "batch", LARGEST // 2, f"{2**30} heads of 1 tiles")


@pytest.mark.parametrize("seq", [2**31, 2**40])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_has_a_choice_that_launches_can_refuse(seq: int, packed: bool) -> None:
    sizes = Extents(1, 1, 1, 1, seq, 64, 1, seq, packed=packed)
    lengths: Any = "packed" if packed else "fixed"
    for wanted in (
        AttentionOperation("bf16", 64, lengths=lengths),
        AttentionBackwardOperation("bf16", 64, lengths=lengths),
    ):
        choice = dispatch.choose(wanted, shape(sizes, Band()))
        told: Any = {"attention_forward": FORWARD, "attention_backward": BACKWARD}[wanted.family]
        with pytest.raises(ProblemError, match=f"{seq}: must be smaller"):
            family(wanted.family).launches(choice.spec, replace(told, seq_k=seq, total_k=seq), H200)

"""Kernels count in 32 bits: from which extents on a call is refused, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from warploom.errors import ProblemError
from warploom.generator.elements import element
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
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmShape, complete
from warploom.generator.launches import DeviceLimits
from warploom.generator.limits import LARGEST, refuse_beyond
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime import dispatch, driver
from warploom.runtime import launch_plan as plan
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.operation import shape
from warploom.runtime.families._attention.problem import Extents

H200 = DeviceLimits(132)


def assert_edge(
    spec: KernelSpec,
    problem: GemmProblem | AttentionProblem,
    field: str,
    largest: int,
    said: str = "",
) -> None:
    """The largest value of a field that is launched; one more is refused, by its name."""
    described = family(spec.operation.family)
    fields = {field: largest}
    if field in ("seq_q", "seq_k"):
        fields |= {field.replace("seq", "total"): largest}
    assert described.launches(spec, replace(problem, **fields), H200)
    fields = {name: value + 1 for name, value in fields.items()}
    with pytest.raises(ProblemError, match=re.escape(said or f"{field} {largest + 1}: ")) as told:
        described.launches(spec, replace(problem, **fields), H200)
    assert told.value.rule.startswith(f"must be smaller: kernels count to {LARGEST}, ")


def test_what_fits_32_bits_is_let_through() -> None:
    refuse_beyond({"m 5": LARGEST, "n 6": 0})
    with pytest.raises(ProblemError, match="n 6: must be smaller: kernels count to 2147483647, "):
        refuse_beyond({"m 5": LARGEST, "n 6": LARGEST + 1})


# ---- GEMM ----------------------------------------------------------------------------------------


def gemm(*, batched: bool = False, **schedule: Any) -> KernelSpec:
    operation = GemmOperation("bf16", "bf16", "bf16", batched=batched)
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, schedule))


PRODUCT = GemmProblem(8, 8, 64, pitch_a=64, pitch_b=64, pitch_d=8)
WIDE: dict[str, Any] = {"tile": (128, 256, 64), "cluster": (2, 1)}


@pytest.mark.parametrize(
    ("field", "schedule", "beside"),
    [
        ("m", WIDE, 128 * 2),
        ("n", WIDE, 256),
        ("n", WIDE | {"tile": (128, 128, 64), "cluster": (1, 2), "raster": "along_n"}, 128 * 2),
        ("k", WIDE, 64),
        ("k", {"tile": (64, 96, 64), "consumers": 1, "split": 4}, 64 * 4),
    ],
)
def test_an_extent_of_a_product_leaves_room_for_a_tile(
    field: str, schedule: dict[str, Any], beside: int
) -> None:
    assert_edge(gemm(**schedule), PRODUCT, field, LARGEST - beside)


@pytest.mark.parametrize(("roles", "beside"), [("cooperative", 132), ("pingpong", 2 * 132)])
def test_tiles_of_all_batches_leave_room_for_each_cluster_s_next(roles: str, beside: int) -> None:
    spec = gemm(batched=True, tile=(128, 128, 64), roles=roles)
    assert_edge(spec, PRODUCT, "batches", LARGEST - beside, "m 8, n 8, batches ")


def test_a_band_of_tiles_is_counted() -> None:
    """group * tiles across is 2^32 at n 2^25: a division by 0."""
    spec = gemm(tile=(64, 8, 64), consumers=1, group=1024, store="direct")
    assert_edge(spec, PRODUCT, "n", 8 * (2**21 - 1), "group 1024 of 2097152 tiles")


@pytest.mark.parametrize("extents", [(2**31, 8, 8), (8, 2**31, 8), (8, 8, 2**40), (2**40, 1, 1)])
def test_dispatch_has_a_choice_that_launches_can_refuse(extents: tuple[int, int, int]) -> None:
    m, n, k = extents
    problem = GemmProblem(m, n, k, pitch_a=k, pitch_b=k, pitch_d=n)
    wanted = GemmOperation("bf16", "bf16", "bf16")
    choice = dispatch.choose(wanted, GemmShape(m, n, k), device=H200, requires="direct")
    with pytest.raises(ProblemError, match=f"[mnk] {max(extents)}: must be smaller"):
        family("gemm").launches(choice.spec, problem, H200)


# ---- Attention -----------------------------------------------------------------------------------

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


# ---- Where it is asked ---------------------------------------------------------------------------


def test_nothing_is_built_for_a_call_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a kernel is built")

    monkeypatch.setattr(driver, "limits", lambda _: H200)
    monkeypatch.setattr(plan, "kernel", build)
    with pytest.raises(ProblemError, match="m 2147483647: must be smaller"):
        plan.plan_launches(gemm(**WIDE), replace(PRODUCT, m=LARGEST), 0, ("a", "b", "d"), ())
    with pytest.raises(AssertionError, match="a kernel is built"):
        plan.plan_launches(gemm(**WIDE), PRODUCT, 0, ("a", "b", "d"), ())


@pytest.mark.parametrize(
    ("fits", "changes"),
    [
        (True, {}),
        (True, {"extents": (64, 2**32)}),
        (False, {"extents": (64, 2**32 + 1)}),
        (False, {"extents": (0, 8)}),
        (True, {"pitches": (2**40 - 16,)}),
        (False, {"pitches": (2**40,)}),
        (False, {"pitches": (-16,)}),  # of packed rows more than 2^34 bytes apart
        (False, {"pitches": (24,)}),
    ],
)
def test_a_tensor_map_is_refused_beyond_what_tma_takes(fits: bool, changes: dict[str, Any]) -> None:
    described = TensorMap("a", element("bf16"), (64, 8), (128,), (64, 8), 128)
    assert replace(described, **changes).fits(1024) is fits
    assert not replace(described, **changes).fits(1032)

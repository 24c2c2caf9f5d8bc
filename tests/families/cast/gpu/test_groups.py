"""Rows in groups that end at offsets on the device: every bit against torch, and their GEMMs."""

from __future__ import annotations

from typing import Any

import cast_cases as cases
import pytest
import torch
from cast_cases import short

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
E4M3 = torch.float8_e4m3fn
EXTENTS = [(1, 256), (127, 256), (130, 512), (257, 1280), (600, 768), (1031, 256)]
ENDS: dict[str, tuple[int, list[int]]] = {
    "one group": (300, [300]),
    "one that has not all": (300, [299]),
    "whole blocks": (512, [128, 384, 512]),
    "empty": (300, [0, 0, 130, 130, 299, 299]),
    "as many as there may be": (2000, [*range(0, 1990, 2), *[1990] * 28, 2000]),
    "more groups than rows": (7, [*[0] * 500, *[3] * 500, *[7] * 24]),
}


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("kernel", cases.GROUPS, ids=short)
def test_every_bit_of_groups_is_right(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize("kernel", cases.GROUPS, ids=short)
def test_groups_of_any_pitch_and_address_are_read_and_written_in_place(kernel: KernelSpec) -> None:
    for pad, shift in ((16, 0), (8, 8), (1, 0), (13, 1)):
        cases.made(kernel, 387, 512, pad=pad, shift=shift).verify()


@pytest.mark.parametrize("which", ENDS)
@pytest.mark.parametrize("kernel", cases.GROUPS, ids=short)
def test_groups_may_end_anywhere(kernel: KernelSpec, which: str) -> None:
    m, ends = ENDS[which]
    cases.made(kernel, m, 256, ends=ends).verify()


def keywords(block: str | tuple[int, int]) -> dict[str, Any]:
    return {"block": block, "transpose": True}


@pytest.mark.parametrize("block", ["tensor", "row", (1, 128)], ids=str)
def test_one_graph_serves_all_offsets_and_clamps_them(block: str | tuple[int, int]) -> None:
    """Nothing waits for the device, and what no group has is as it was."""
    m, n = 700, 320
    x = torch.randn(m, n, device="cuda").bfloat16()
    offsets = torch.tensor([5, 5, 300, 640, 650, 650], device="cuda", dtype=torch.int32)
    warploom.cast(x, E4M3, offsets=offsets, **keywords(block))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = warploom.cast(x, E4M3, offsets=offsets, **keywords(block))
    for ends in (
        [5, 3, 900, -4, 100, 2**31 - 1],
        [100, 200, 150, 300, 250, 690],
        [-(2**31), 2**31 - 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
        [0] * 6,
        [-5] * 6,
    ):
        given = torch.tensor(ends, device="cuda", dtype=torch.int32)
        clamped = given.clamp(0, m).cummax(0).values.to(torch.int32)
        last = int(clamped[-1])
        values = torch.randn(m, n, device="cuda").bfloat16()
        values[last:] = torch.nan
        x.copy_(values)
        offsets.copy_(given)
        graph.replay()
        right = warploom.cast(values.cpu(), E4M3, offsets=clamped.cpu(), **keywords(block))
        last_t = int(right[4][-1])
        assert torch.equal(found[4].cpu(), right[4])
        if not last:  # scales of what is not there may be any
            continue
        for name, one, other in zip(("q", "scale", "q_t", "scale_t"), found, right, strict=False):
            one, other = (cases.of_groups(name, t.cpu(), last, last_t) for t in (one, other))
            assert not cases.differ(one, other).any(), (name, ends)


def test_no_call_waits_for_the_device() -> None:
    x = torch.randn(300, 256, device="cuda").bfloat16()
    offsets = torch.tensor([5, 300], device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for block in ("tensor", "row", (1, 128)):
            *_, q_t, scale_t, ends = warploom.cast(x, E4M3, offsets=offsets, **keywords(block))
            scales = {"scale_a": scale_t, "scale_b": scale_t}
            warploom.grouped_gemm(q_t, q_t.t(), offs=ends, **scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("block", ["tensor", "row", (1, 128)], ids=str)
def test_gradients_of_weights_are_those_of_the_rows_of_a_group(
    block: str | tuple[int, int], dtype: torch.dtype, compiled: bool
) -> None:
    """Both operands as casts write them, against float64 of what they stand for."""
    if (block, dtype) == ((1, 128), torch.int8):
        pytest.skip("block scales are of fp8")
    torch.manual_seed(0)
    m, n, k = 1000, 264, 200
    ends = [0, 130, 130, 131, 700, 700, 955]
    offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
    x, dy = (torch.randn(m, width, device="cuda").bfloat16() for width in (k, n))
    x[955:], dy[955:] = torch.nan, torch.nan

    def gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        *_, x_t, scale_x, _ = warploom.cast(x, dtype, offsets=offsets, **keywords(block))
        *_, dy_t, scale_dy, ends = warploom.cast(dy, dtype, offsets=offsets, **keywords(block))
        return warploom.grouped_gemm(
            *(dy_t, x_t.t()),
            offs=ends,
            scale_a=scale_dy,
            scale_b=scale_x,
            out_dtype=torch.float32,
            use_fast_accum=dtype == torch.int8,  # whose sums are exact
        )

    dw = (torch.compile(gradient, fullgraph=True) if compiled else gradient)(x, dy)
    assert dw.shape == (len(ends), n, k)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        exact = dy[start:end].double().t() @ x[start:end].double()
        if start == end:
            assert not dw[group].any()
        else:
            assert (dw[group].double() - exact).norm() <= 0.1 * exact.norm()


def test_results_of_groups_have_the_same_bits_in_every_run() -> None:
    for kernel in cases.GROUPS[:3]:
        made = cases.made(kernel, 1000, 333)
        first = [one.clone() for one in made.verify()]
        for _ in range(20):
            for one, other in zip(made.run(), first, strict=True):
                assert not cases.differ(one, other).any()

"""Every bit of the pieces and of scales against torch, over dimensions that no tile divides."""

from __future__ import annotations

from dataclasses import replace

import fp32_pieces_cases as cases
import pytest
import torch
from fp32_pieces_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
EXTENTS = [(1, 1), (1, 4096), (3, 63), (65, 129), (64, 64), (200, 600), (257, 4100), (1031, 17)]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_bit_is_right(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    if extents[0] == 1 and kernel.operation.layout == "col":
        pytest.skip("a matrix of one row is read by rows")
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_rows_of_any_stride_and_address_are_read_in_place(kernel: KernelSpec) -> None:
    for pad, shift in ((16, 0), (8, 4), (1, 0), (13, 1), (0, 3)):
        cases.made(kernel, 130, 200, pad=pad, shift=shift).verify()


@pytest.mark.parametrize("extents", [(4096, 4096), (70_000, 65), (7, 152_064)], ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_large_matrices(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize("kernel", [one for one in cases.EVERY if one.operation.spans == "wide"])
def test_nothing_is_written_where_fp16_pieces_hold(kernel: KernelSpec) -> None:
    """The words of either operand may say so, also of rows that a CTA takes in its second turn."""
    for m, k in ((130, 200), (5000, 70)):
        made = cases.made(kernel, m, k)
        for one in made.guarded:
            one.room.fill_(-1)
        plan.run(replace(made.call, span_a=cases.NARROW.cuda(), span_b=cases.NARROW.cuda()))
        assert all((one.room == -1).all() for one in made.guarded)
        made.verify()


@pytest.mark.parametrize("layout", ["row", "col"])
def test_what_rows_span_is_found_anew_by_every_launch(layout: str) -> None:
    """The words that launches raise are zeros again when the next one begins."""
    for m, k in ((130, 5000), (1, 64), (130, 200), (3000, 1000), (130, 5000)):
        if layout == "row" or m > 1:
            cases.made(cases.spec(layout=layout), m, k).verify()
            cases.made(cases.spec(layout=layout), m, k, seed=1).verify()


def test_another_stream_and_a_graph_split_what_is_there_then() -> None:
    x, stream = torch.randn(300, 500, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warploom.fp32_pieces(x.t())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = warploom.fp32_pieces(x.t())
    x.mul_(3)
    graph.replay()
    again, scale_again = warploom.fp32_pieces(x.t())
    assert scale is not None and scale_again is not None
    assert torch.equal(q, again) and torch.equal(scale, scale_again)

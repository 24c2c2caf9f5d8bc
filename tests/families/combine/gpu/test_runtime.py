"""Memory, streams, graphs and compilers of calls on a GPU."""

from __future__ import annotations

import combine_cases as cases
import pytest
import torch
from rooms import assert_repeats

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


def routed(tokens: int, k: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, 16, device="cuda").topk(k, -1).indices
    offsets, _, inverse = warploom.route(ids, 12)
    return offsets, inverse


@pytest.mark.parametrize("kernel", cases.SMOKE, ids=cases.short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, 333, 3, 520, pad=8)
    integers = [one.view(cases.INTEGERS[one.dtype.itemsize]).clone() for one in made.verify()]

    def run() -> list[torch.Tensor]:
        return [one.view(cases.INTEGERS[one.dtype.itemsize]) for one in made.run()]

    assert_repeats(run, integers, made.guarded, runs=100)


def test_a_view_is_copied_only_where_its_rows_cannot_be_read() -> None:
    _, inverse = routed(50)
    whole = torch.randn(200, 96, device="cuda")
    for view, copies in ((whole[:, 8:72], 0), (whole[:, 3:67], 1), (whole.t()[:, :96].t(), 0)):
        before = warploom.counters.copies
        found = warploom.combine(view, inverse)
        assert warploom.counters.copies - before == copies
        assert torch.equal(found, warploom.combine(view.contiguous(), inverse))


def test_a_call_runs_on_the_current_stream_behind_what_is_there() -> None:
    _, inverse = routed(1000)
    rows = torch.randn(4000, 512, device="cuda").bfloat16()
    wanted, held = warploom.combine(rows, inverse), torch.zeros_like(rows)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.copy_(rows)
        found = warploom.combine(held, inverse)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, wanted)


def test_one_graph_serves_every_routing() -> None:
    offsets, inverse = routed(100)
    hidden, weights = torch.randn(100, 64, device="cuda"), torch.rand(100, 4, device="cuda")

    def layer() -> torch.Tensor:
        rows = warploom.permute(hidden, inverse, offsets=offsets)
        return warploom.combine(rows, inverse, weights)

    layer()  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer()
    for _ in range(3):
        for one, new in zip((offsets, inverse), routed(100), strict=True):
            one.copy_(new)
        hidden.normal_()
        graph.replay()
        assert torch.equal(found, layer())


def test_a_warm_call_plans_and_copies_nothing() -> None:
    offsets, inverse = routed(64)
    hidden = torch.randn(64, 64, device="cuda")
    rows = warploom.permute(hidden, inverse, offsets=offsets)
    warploom.combine(rows, inverse)
    before = warploom.counters.as_dict()
    warploom.combine(warploom.permute(hidden, inverse, offsets=offsets), inverse)
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 2
    assert after == before


def test_compiled_code_has_gradients() -> None:
    offsets, inverse = routed(96)
    hidden = torch.randn(96, 64, device="cuda").requires_grad_()
    weights = torch.rand(96, 4, device="cuda").requires_grad_()

    def layer(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = warploom.permute(hidden, inverse, offsets=offsets)
        return warploom.combine(rows * 2, inverse, weights, offsets=offsets)

    wanted = torch.autograd.grad(layer(hidden, weights).sum(), (hidden, weights))
    compiled = torch.compile(layer, fullgraph=True)
    found = torch.autograd.grad(compiled(hidden, weights).sum(), (hidden, weights))
    for one, held in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, held)


def test_nothing_is_launched_for_no_tokens() -> None:
    before = warploom.counters.launches
    none = torch.zeros(0, 4, dtype=torch.int32, device="cuda")
    assert warploom.combine(torch.zeros(8, 16, device="cuda"), none).shape == (0, 16)
    assert warploom.counters.launches == before

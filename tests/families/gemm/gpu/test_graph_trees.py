"""The CUDA graphs of torch.compile: sums are added to where they are, and never to a copy."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch._inductor.utils import fresh_cache

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm import operators

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Torch 2.11 takes graphs from its caches by what they compute, whatever inputs they copy."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with fresh_cache():
        yield
    gc.collect()


def given() -> list[torch.Tensor]:
    """The x, weight and bias of a layer."""
    shapes = ((257, 192), (136, 192), (136,))
    x, *leaves = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    return [x, *(one.requires_grad_() for one in leaves)]


def squared(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, into: torch.Tensor
) -> torch.Tensor:
    d = warploom.gemm(x, weight.t(), bias=bias, activation="silu", main_grad=into.t())
    return d.float().square().mean()


def test_graph_trees_replay_forward_and_backward_passes() -> None:
    """Graph trees check that no memory of a graph's pool is kept by anything that they miss."""
    x, weight, bias = given()
    expected, *both = (torch.zeros(136, 192, device="cuda") for _ in range(3))
    compiled = torch.compile(squared, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        for call, sums in ((squared, expected), *((compiled, into) for into in both)):
            torch.compiler.cudagraph_mark_step_begin()
            bias.grad = None  # or it would be added to what a graph has written over
            call(x, weight, bias, sums).backward()
        for into in both:  # a step adds some 1e-3
            torch.testing.assert_close(into, expected, rtol=2**-7, atol=2e-4)
    assert "cudagraph_skips" not in torch._dynamo.utils.counters["inductor"]


def test_sums_that_a_graph_would_copy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients would be added to the copy, and be lost without a word."""
    monkeypatch.setattr(operators, "keep_in_place", lambda _: None)
    x, weight, bias = given()
    into, once = torch.zeros(136, 192, device="cuda"), torch.zeros(136, 192, device="cuda")
    squared(x, weight, bias, once).backward()
    compiled = torch.compile(squared, fullgraph=True, mode="reduce-overhead")
    bias.grad = None
    compiled(x, weight, bias, into).backward()  # warms up, in place
    torch.testing.assert_close(into, once, rtol=2**-7, atol=2e-4)
    torch.compiler.cudagraph_mark_step_begin()
    with pytest.raises(ProblemError, match="a copy"):
        compiled(x, weight, bias, into)

"""Attention of operands that are quantized first, on a GPU: results, gradients, launches."""

from __future__ import annotations

import pytest
import torch

import warploom

pytestmark = pytest.mark.gpu
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(keys: int, dim: int) -> Operands:
    random = torch.Generator("cuda").manual_seed(keys + dim)
    q, k, v = (
        torch.randn(2, heads, keys, dim, generator=random, device="cuda") for heads in (8, 2, 2)
    )
    k, v = k + 5 * torch.randn(2, 1, dim, generator=random, device="cuda"), v + 1
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def apart(one: torch.Tensor, right: torch.Tensor) -> float:
    return float((one.double() - right).norm() / right.norm())


@pytest.mark.parametrize("scores", ["int8", "e4m3"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("keys", "dim"), [(1000, 64), (1031, 128), (517, 96)])
def test_results_and_gradients_are_near_those_of_float64(
    keys: int, dim: int, causal: bool, scores: str
) -> None:
    q, k, v = operands(keys, dim)
    wide = [one.double().requires_grad_() for one in (q, k, v)]
    shared = [one.repeat_interleave(4, 1) for one in wide[1:]]
    weights = wide[0] @ shared[0].mT * dim**-0.5
    if causal:
        hidden = torch.ones(keys, keys, device="cuda").triu(1).bool()
        weights = weights.masked_fill(hidden, -torch.inf)
    right = weights.softmax(-1) @ shared[1]
    given = [one.requires_grad_() for one in (q, k, v)]
    out, lse = warploom.attention_8bit(*given, scores=scores, causal=causal, return_lse=True)
    assert apart(out, right) < 0.02 and (lse - weights.logsumexp(-1)).abs().max() < 0.2
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, given, dout)
    for one, wanted in zip(found, torch.autograd.grad(right, wide, dout.double()), strict=True):
        assert apart(one, wanted) < 0.1


def test_a_warm_call_launches_three_times_and_copies_nothing() -> None:
    given = operands(1000, 128)
    warploom.attention_8bit(*given)
    before = warploom.counters.as_dict()
    warploom.attention_8bit(*given)
    after = warploom.counters.as_dict()
    assert after["launches"] - before["launches"] == 3
    assert (after["copies"], after["plans"]) == (before["copies"], before["plans"])


def test_a_captured_call_runs_again_on_what_is_new() -> None:
    q, k, v = operands(1000, 128)
    warploom.attention_8bit(q, k, v)  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention_8bit(q, k, v)
    for _ in range(3):
        for one in (q, k, v):
            one.normal_()
        graph.replay()
        assert torch.equal(out, warploom.attention_8bit(q, k, v))

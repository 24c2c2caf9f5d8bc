"""Gated layers on a GPU: one kernel for gate and up, in graphs too, and layers that train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from warploom.nn import GatedMLP
from warploom.runtime.counters import counters

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def exact(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (
        layer.weight.double() for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    x = x.double()
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_a_layer_is_two_launches(rows: int) -> None:
    torch.manual_seed(0)
    mlp, x = GatedMLP(512, 1376, device="cuda", dtype=BF16), torch.randn(rows, 512).cuda().to(BF16)
    with torch.no_grad():
        mlp(x)
        before = counters.launches
        found = mlp(x)
        assert counters.launches - before <= 4  # two products, each of two launches at most
    off = (found.double() - exact(mlp, x)).abs().max()
    assert off <= 2**-6 * exact(mlp, x).abs().max()


def test_a_captured_layer_reads_what_its_weights_are_by_then() -> None:
    mlp, x = GatedMLP(512, 1376, device="cuda", dtype=BF16), torch.randn(5, 512).cuda().to(BF16)
    with torch.no_grad():
        mlp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mlp(x)
        mlp.gate_proj.weight.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        off = (out.double() - exact(mlp, x)).abs().max()
        assert off <= 2**-6 * exact(mlp, x).abs().max()


def test_a_layer_that_moves_between_devices_is_joined_again() -> None:
    mlp = GatedMLP(64, 96, dtype=BF16).cuda()
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.numel() * 2


def test_a_layer_trains_by_its_layers() -> None:
    mlp, x = GatedMLP(64, 96, device="cuda", dtype=BF16), torch.randn(5, 64).cuda().to(BF16)
    mlp(x).sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in mlp.parameters())

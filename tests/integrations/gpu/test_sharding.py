"""Distributed tensors on a GPU: each process gives what it has to the kernels of plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import warploom

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Makes distributed tensors over this one process, along their first dimension."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    mesh = init_device_mesh(DEVICE, (1,))
    yield lambda one: distribute_tensor(one.detach(), mesh, [Shard(0)]).requires_grad_()
    dist.destroy_process_group()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16().requires_grad_()


def hold(
    function: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    shard: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Results and gradients have the bits of the plain call."""
    want = function(*tensors)
    gradient = torch.randn_like(want)
    want.backward(gradient)
    given = [shard(one) for one in tensors]
    found = function(*given)
    found.backward(shard(gradient).detach())
    assert torch.equal(found.full_tensor(), want)
    for one, other in zip(given, tensors, strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_products_train(
    shard: Callable[[torch.Tensor], torch.Tensor], activation: str | None
) -> None:
    """Of a bias and an activation, whose gradients have kernels of their own."""

    def function(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, bias=bias, activation=activation)

    hold(function, (leaf(200, 136), leaf(136, 264), leaf(264)), shard)


def test_attention_trains(shard: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The backward pass finds its own rule."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, v, causal=True, deterministic=True)

    hold(function, (leaf(2, 4, 256, 64), leaf(2, 2, 256, 64), leaf(2, 2, 256, 64)), shard)

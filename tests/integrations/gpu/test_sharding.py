"""Distributed tensors on a GPU: each process gives what it has to the kernels of plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import warploom
from warploom.float8 import Float8LinearConfig, convert_to_float8_training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this one process."""
    import torch.distributed as dist
    from torch.distributed.tensor import init_device_mesh

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


@pytest.fixture
def shard(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes distributed tensors over this one process, along their first dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return lambda one: distribute_tensor(one.detach(), mesh, [Shard(0)]).requires_grad_()


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


@pytest.mark.parametrize("reshards", [True, False])
def test_weights_that_are_gathered_in_fp8_train(mesh: DeviceMesh, *, reshards: bool) -> None:
    """Guards against a scale that the stream of gathers has not computed, or whose memory is used
    anew: weights are large, and change between steps while the next gather may begin.
    """
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    sizes = ((512, 4096), (4096, 4096), (4096, 4096), (4096, 512))
    layers = [nn.Linear(k, n, bias=False, device=DEVICE).bfloat16() for k, n in sizes]
    whole = nn.Sequential(*layers)
    module = copy.deepcopy(whole)
    convert_to_float8_training(whole)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(module, config=config)
    for layer in module:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-7)  # gradients of large ones are 1e7
    for step in range(6):
        state = {name: one.full_tensor() for name, one in module.state_dict().items()}
        whole.load_state_dict(state)
        whole.zero_grad()
        x = torch.randn(256, 512, device=DEVICE).bfloat16()
        want, y = whole(x), module(x)
        gradient = torch.randn_like(want)
        y.backward(gradient)
        want.backward(gradient)
        pairs = [(y, want)]
        pairs += [
            (one.weight.grad.full_tensor(), other.weight.grad)
            for one, other in zip(module, whole, strict=True)
        ]
        for found, right in pairs:
            error = (found.float() - right.float()).norm() / right.float().norm()
            # Scales differ by a rounding, so that some values of layers fall to the other side.
            assert float(error.detach()) < 0.1, step
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # by which a scale of the step before saturates, or loses values
            for layer in module:
                layer.weight.mul_(1 / 16 if step % 2 else 16)

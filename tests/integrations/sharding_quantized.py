"""Quantized layers under DistributedDataParallel, fully_shard and parallelize_module."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sharding_checks import PROCESSES, case

import warploom
from warploom.errors import ProblemError
from warploom.integrations.checkpoints import experts as mixtures
from warploom.integrations.checkpoints.experts import QuantizedExperts
from warploom.nn import QuantizedLinear

ROWS, K, N = 4, 256, 512
FORMATS = (("int4", 128), ("uint4", None))  # one tensor, and all that there are


def model(format: str, group: int | None) -> torch.nn.Sequential:
    """Two quantized layers and one that trains: the same on each rank."""
    made = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Linear(N, 200), torch.nn.ReLU())
    made.append(torch.nn.Linear(200, 8))
    warploom.patch(made.bfloat16(), weights={"format": format, "group": group, "skip": ["3"]})
    return made


def codes(module: torch.nn.Module) -> list[torch.Tensor]:
    return [one for one in module.parameters() if not one.requires_grad]


def rows() -> torch.Tensor:
    return torch.randn(ROWS, K).bfloat16()


@case
def ddp_broadcasts_weights_once() -> None:
    """As buffers, which DDP broadcasts in each forward, they took more time than the step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model("uint4", None))
    sent, broadcast = [], dist._broadcast_coalesced

    def counting(group: Any, tensors: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        sent.append(sum(one.nbytes for one in tensors))
        broadcast(group, tensors, *rest, **more)

    dist._broadcast_coalesced = counting
    try:
        for _ in range(2):
            wrapped(rows()).sum().backward()
    finally:
        dist._broadcast_coalesced = broadcast
    assert not sum(sent), sent
    assert list(wrapped.module.buffers()) == []
    assert wrapped.module[0].bias.grad is not None


@case
def fully_shard_keeps_a_part_of_each_weight() -> None:
    """Each rank has its rows; gathered they give the result of the whole layer, bit for bit."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for format, group in FORMATS:
        sharded = model(format, group)
        whole = copy.deepcopy(sharded)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in (sharded[0], sharded[1], sharded[3]):
            fully_shard(layer, mp_policy=policy)
        fully_shard(sharded)
        before = [one.full_tensor() for one in codes(sharded)]
        for one, all_of_it in zip(codes(sharded), before, strict=True):
            assert one.to_local().numel() * PROCESSES == all_of_it.numel()
        x = rows()
        found, expected = sharded(x), whole(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        grad = sharded[1].bias.grad
        assert torch.equal(grad.full_tensor(), whole[1].bias.grad)
        torch.optim.AdamW(sharded.parameters(), lr=0.1).step()
        after = [one.full_tensor() for one in codes(sharded)]
        assert all(map(torch.equal, before, after))
        assert not torch.equal(sharded(x), found)


@case
def fully_shard_gathers_the_experts_of_each_step() -> None:
    """Kept in one piece of memory, biases stayed what they were before the first step, and each
    rank had all weights from the first pass on.
    """
    from torch.distributed.fsdp import fully_shard

    def experts(n: int, k: int) -> list[QuantizedLinear]:
        made = [torch.nn.Linear(k, n).bfloat16() for _ in range(3)]
        return [QuantizedLinear.from_linear(one, "mxfp4") for one in made]

    torch.manual_seed(0)
    sharded = QuantizedExperts(experts(128, 64), experts(64, 64))
    whole, refusal = copy.deepcopy(sharded), mixtures.refusal
    fully_shard(sharded)
    hidden, ids = torch.randn(7, 64).bfloat16(), torch.arange(14).view(7, 2) % 3
    weights = torch.rand(7, 2).bfloat16()
    mixtures.refusal = lambda *_: None  # type: ignore[assignment]
    try:
        for _ in range(3):
            with torch.no_grad():
                sharded(hidden, ids, weights), whole(hidden, ids, weights)
            tokens = [hidden.clone().requires_grad_() for _ in range(2)]
            pair = [one(x, ids, weights) for one, x in zip((sharded, whole), tokens, strict=True)]
            for out in pair:
                out.float().square().sum().backward()
            for one, other in (pair, [one.grad for one in tokens]):
                assert (one - other).float().norm() <= 2**-6 * other.float().norm()
            for module in (sharded, whole):
                torch.optim.SGD(module.parameters(), lr=0.1).step()
                module.zero_grad()
        assert not torch.equal(whole(hidden, ids, weights), pair[1])
    finally:
        mixtures.refusal = refusal
    assert [one._made for one in sharded._stacks.values()] == [None, None]


@case
def states_of_sharded_layers_are_those_of_whole_ones() -> None:
    """A checkpoint of a run on many GPUs is served on one, and the other way round."""
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.fsdp import fully_shard

    options = states.StateDictOptions(full_state_dict=True)
    for format, group in FORMATS:
        whole, sharded, x = model(format, group), model(format, group), rows()
        assert not torch.equal(sharded(x), whole(x))
        fully_shard(sharded)
        states.set_model_state_dict(sharded, whole.state_dict(), options=options)
        assert torch.equal(sharded(x), whole(x))
        again = model(format, group)
        again.load_state_dict(states.get_model_state_dict(sharded, options=options))
        assert torch.equal(again(x), whole(x))


@case
def scales_that_were_converted_are_refused() -> None:
    """A kernel of fp16 scales would read bf16's bits as others."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layer = QuantizedLinear(K, N, format="int4", group=None, scale_dtype=torch.float16)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float32):  # a kernel's, and torch's
        try:
            layer(torch.ones(2, K, dtype=dtype))
        except ProblemError as error:
            assert "channel_scales" in str(error) and "torch.float16" in str(error), error
        else:
            raise AssertionError(f"computed in {dtype}")


@case
def tensor_parallel_layers_are_refused() -> None:
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for style in (ColwiseParallel(), RowwiseParallel()):
        layer = QuantizedLinear(K, N, dtype=torch.bfloat16)
        try:
            parallelize_module(layer, mesh, style)
            layer(torch.ones(2, K).bfloat16())
        except ProblemError as error:
            assert "tensor parallelism" in str(error), error
        else:
            raise AssertionError(f"computed by {type(style).__name__}")

"""Attention and layers of distributed tensors: cases of sharding_cases.py."""

from __future__ import annotations

import copy

import pytest
import torch
from sharding_checks import LOOSE, PROCESSES, case, check, moved, shared, values

import warploom
from warploom.errors import ProblemError
from warploom.float8 import Float8LinearConfig, convert_to_float8_training
from warploom.integrations.float8_sharding import GatheredWeight
from warploom.integrations.recipes import RECIPES

# ---- Attention -----------------------------------------------------------------------------------


@case
def attention_is_split_by_batch_and_by_heads() -> None:
    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = warploom.attention(q, k, v, causal=True, return_lse=True)
        return out + lse.unsqueeze(-1)

    for heads, kv_heads in ((3, 3), (4, 2)):
        q, k, v = (values(3, count, 10, 16) for count in (heads, kv_heads, kv_heads))
        for place, expected in ((0, "0"), (1, "1"), (None, "whole")):
            check(attended, (q, k, v), (place,) * 3, expected)


@case
def heads_that_share_one_of_k_stay_together() -> None:
    q, k, v = (values(3, count, 10, 16, grad=False) for count in (4, 1, 1))
    want = warploom.attention(q, k, v)
    found = warploom.attention(shared(q, 1), shared(k, None), shared(v, None))
    torch.testing.assert_close(found.full_tensor(), want)


@case
def packed_attention_is_split_by_heads() -> None:
    q, k, v = (values(20, 4, 16) for _ in range(3))
    starts = torch.tensor([0, 8, 20], dtype=torch.int32)

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = starts if type(q) is torch.Tensor else shared(starts, None)
        lengths = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": 12, "max_seqlen_k": 12}
        return warploom.attention(q, k, v, **lengths)

    check(attended, (q, k, v), (1, 1, 1), "1", (1, 0))  # one message hands out `starts`


# ---- Models --------------------------------------------------------------------------------------


def perceptron() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        warploom.nn.Linear(16, 34, activation="gelu_tanh", dtype=torch.bfloat16),
        warploom.nn.Linear(34, 8, dtype=torch.bfloat16),
    )


def hold(module: torch.nn.Module, plain: torch.nn.Module) -> None:
    for (name, one), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        found = one.grad.full_tensor()
        torch.testing.assert_close(found, other.grad, **LOOSE, msg=lambda m, n=name: f"{n}: {m}")
        assert other.grad.abs().max() > 0


@case
def a_tensor_parallel_perceptron_trains() -> None:
    """One message forward, one backward, as with torch's layers."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plain = perceptron()
    mesh = init_device_mesh("cpu", (PROCESSES,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    module = parallelize_module(copy.deepcopy(plain), mesh, plan)
    x = values(2, 5, 16)
    other = x.detach().clone().requires_grad_()
    sent, y = moved(lambda: module(x))
    want = plain(other)
    torch.testing.assert_close(y, want, **LOOSE)
    assert sent == 1
    gradient = torch.randn_like(want)
    sent, _ = moved(lambda: y.backward(gradient))
    assert sent == 1
    want.backward(gradient)
    torch.testing.assert_close(x.grad, other.grad, **LOOSE)
    hold(module, plain)


@case
def fully_sharded_layers_train_by_every_recipe() -> None:
    """What is cached of a weight is of the one that was gathered last, whatever changed it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh, x = init_device_mesh("cpu", (PROCESSES,)), values(6, 16, grad=False)
    for recipe in RECIPES:
        for reshards in (True, False):
            options = {"dtype": torch.bfloat16, "recipe": recipe}
            torch.manual_seed(1)
            module = warploom.nn.Linear(16, 34, **options)
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for step in range(4):
                plain = warploom.nn.Linear(16, 34, **options)
                whole = {name: one.full_tensor() for name, one in module.state_dict().items()}
                plain.load_state_dict(whole)
                if module.scaling is not None:
                    plain.scaling = copy.deepcopy(module.scaling)
                want, y = plain(x), module(x)
                assert torch.equal(y, want), (recipe, reshards, step)
                gradient = torch.randn_like(want)
                y.backward(gradient)
                want.backward(gradient)
                module.reshard()
                found = module.weight.grad.full_tensor()
                torch.testing.assert_close(found, plain.weight.grad, **LOOSE)
                if step == 0:
                    optimizer.step()
                elif step == 1:  # no version of the gathered weight counts it
                    with torch.no_grad():
                        module.weight.mul_(2)
                else:
                    state = {name: 2 * one for name, one in module.state_dict().items()}
                    module.load_state_dict(state)
                optimizer.zero_grad()


@case
def weights_are_gathered_in_fp8() -> None:
    """Also those of which processes have other numbers of rows, and after steps that change them:
    what is gathered is what is cast of the whole weight.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh, gathered = init_device_mesh("cpu", (PROCESSES,)), dict[torch.nn.Module, torch.Tensor]()
    for reshards, dtype in ((True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float32)):
        x = values(6, 32, grad=False).to(torch.bfloat16)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        torch.manual_seed(1)
        whole = torch.nn.Sequential(torch.nn.Linear(32, 33), torch.nn.Linear(33, 48)).to(dtype)
        module = copy.deepcopy(whole)
        convert_to_float8_training(whole)
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(module, config=config)
        assert torch.equal(module(x.to(dtype)), whole(x.to(dtype)))
        for layer in module:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)
            layer.register_forward_pre_hook(lambda layer, _: gathered.update({layer: layer.weight}))
        fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            state = {name: one.full_tensor() for name, one in module.state_dict().items()}
            whole.load_state_dict(state)
            whole.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                want = whole(x)
            y, gradient = module(x), torch.randn_like(want)
            if not reshards:  # else its memory is free again
                for layer, other in zip(module, whole, strict=True):
                    right, scale = warploom.cast(other.weight.detach(), torch.float8_e4m3fn)
                    assert torch.equal(gathered[layer].scale, scale)
                    off = gathered[layer].eight_bits.float() != right.float()
                    assert float(off.float().mean()) < 0.01  # scales are inverted once more
            y.backward(gradient)
            want.backward(gradient)
            module.reshard()
            pairs = [(y, want)]
            for layer, other in zip(module, whole, strict=True):
                layer.reshard()
                assert type(gathered[layer]) is GatheredWeight
                assert gathered[layer].eight_bits.dtype == torch.float8_e4m3fn
                for name in ("weight", "bias"):
                    found = getattr(layer, name).grad
                    assert found.dtype == dtype
                    pairs.append((found.full_tensor(), getattr(other, name).grad))
            for found, right in pairs:
                error = (found.float() - right.float()).norm() / right.float().norm()
                assert float(error) < 0.02
            optimizer.step()
            optimizer.zero_grad()


@case
def weights_that_are_divided_by_columns_are_not_gathered_in_fp8() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, init_device_mesh

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    layer = convert_to_float8_training(torch.nn.Linear(32, 48, bias=False), config=config)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    fully_shard(layer, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ProblemError, match=r"\(48, 32\) .* \(48, 16\): must be divided by rows"):
        layer(torch.randn(6, 32))


@case
def fully_sharded_layers_that_are_gathered_in_fp8_share_a_weight() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    x, config = values(6, 32, grad=False), Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    whole = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2))).bfloat16()
    whole[1].weight = whole[0].weight
    module = copy.deepcopy(whole)
    convert_to_float8_training(whole)
    fully_shard(
        convert_to_float8_training(module, config=config),
        mesh=init_device_mesh("cpu", (PROCESSES,)),
    )
    for one in (whole, module):
        one(x).float().square().sum().backward()
    assert module[1].weight is module[0].weight
    torch.testing.assert_close(module[0].weight.grad.full_tensor(), whole[0].weight.grad, **LOOSE)


@case
def a_fully_sharded_perceptron_trains() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    plain = perceptron()
    module, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (PROCESSES,))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    x = values(5, 16, grad=False)  # of all processes: the mean of their gradients is that of one
    want = plain(x)
    y = module(x)
    torch.testing.assert_close(y, want, **LOOSE)
    gradient = torch.randn_like(want)
    y.backward(gradient)
    want.backward(gradient)
    hold(module, plain)

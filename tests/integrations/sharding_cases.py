"""Calls on torch's distributed tensors, held against the same call in one process.

Run as a program, this is one of the processes: `sharding_cases.py RANK FOLDER` runs all cases and
writes to FOLDER what each raised.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import warploom
from warploom.errors import ProblemError
from warploom.integrations import devices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PROCESSES = 2
CASES: dict[str, Callable[[], None]] = {}
LOOSE = {"rtol": 2**-6, "atol": 2**-5}  # terms of sums in bf16; a lost step of k is 1 or more


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def shared(tensor: torch.Tensor, place: int | None) -> DTensor:
    """A tensor that lies as `place` says over all processes: a dimension, or None for whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (PROCESSES,))
    where = Replicate() if place is None else Shard(place)
    return distribute_tensor(tensor.detach(), mesh, [where]).requires_grad_(tensor.requires_grad)


def place_of(tensor: DTensor) -> str:
    """Whole, Partial, or the dimension that is shared out."""
    (place,) = tensor.placements
    return "whole" if place.is_replicate() else "terms" if place.is_partial() else str(place.dim)


def moved(call: Callable[[], Any]) -> tuple[int, Any]:
    """How many messages a call sends, and what it returns."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counted:
        result = call()
    return counted.get_total_counts(), result


def check(
    function: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    places: Sequence[int | None],
    expected: str,
    messages: tuple[int, int] = (0, 0),
) -> None:
    """Hold results, gradients and messages, forward and backward, against what is expected."""
    want = function(*tensors)
    gradient = torch.randn(want.shape).to(want.dtype)
    given = [shared(one, place) for one, place in zip(tensors, places, strict=True)]
    sent, found = moved(lambda: function(*given))
    assert (place_of(found), sent) == (expected, messages[0])
    assert found.shape == want.shape
    assert found.stride() == want.stride()
    torch.testing.assert_close(found.full_tensor(), want, **LOOSE)
    if not want.requires_grad:
        return
    arriving = shared(gradient, int(expected) if expected.isdigit() else None)
    sent, _ = moved(lambda: found.backward(arriving))
    assert sent == messages[1]
    want.backward(gradient)
    for one, other in zip(given, tensors, strict=True):
        if other.requires_grad:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, **LOOSE)
            assert other.grad.abs().max() > 0
            other.grad = None


# ---- Products ------------------------------------------------------------------------------------


def product(**options: Any) -> Callable[..., torch.Tensor]:
    def called(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        return warploom.gemm(
            a, b, bias=bias, residual=residual, out_dtype=torch.float32, beta=0.5, **options
        )

    return called


def operands() -> list[torch.Tensor]:
    """Extents are odd: one process has more than the other."""
    wide = torch.float32
    bias, residual = values(9, dtype=wide), values(5, 7, 9, dtype=wide)
    return [values(5, 7, 25), values(25, 9), bias, residual]


SPLITS: dict[str, tuple[tuple[int | None, ...], str]] = {
    "batches": ((0, None, None, 0), "0"),
    "rows": ((1, None, None, 1), "1"),
    "columns": ((None, 1, 0, 2), "2"),
    "nothing": ((None, None, None, None), "whole"),
}


@case
def products_are_split_along_each_dimension_of_d() -> None:
    for places, expected in SPLITS.values():
        for options in (
            {},
            {"scale_a": 0.5},
            {"activation": "relu"},
            {"activation": "gelu"},
            {"activation": "silu", "preactivation": "recompute"},
        ):
            check(product(**options), operands(), places, expected)


@case
def a_relu_that_ends_the_epilogue_is_split() -> None:
    """The backward pass keeps D there, which lies as D does."""
    for places, expected in SPLITS.values():
        check(
            lambda a, b, bias: warploom.gemm(a, b, bias=bias, activation="relu"),
            operands()[:3],
            places[:3],
            expected,
        )


@case
def products_split_along_k_are_terms_of_a_sum_with_one_bias() -> None:
    check(product(scale_a=2.0), operands(), (2, 0, None, None), "terms")


@case
def an_activation_of_terms_is_not_the_term_of_an_activation() -> None:
    """The operands are put together first, in two messages."""
    check(product(activation="gelu"), operands(), (2, 0, None, None), "whole", (2, 0))


@case
def terms_of_eight_bits_would_saturate() -> None:
    a, b = (torch.randint(-9, 9, shape).to(torch.int8) for shape in ((6, 32), (32, 16)))
    scale = torch.full((1,), 0.01)
    call = lambda a, b, s: warploom.gemm(a, b, scale_a=s, out_dtype=torch.int8)  # noqa: E731
    found = call(shared(a, 1), shared(b, 0), shared(scale, None))
    assert place_of(found) == "whole"
    assert torch.equal(found.full_tensor(), call(a, b, scale))


@case
def batches_of_both_operands_are_split() -> None:
    a, b = values(3, 4, 8), values(3, 8, 6)
    check(warploom.gemm, (a, b), (0, 0), "0")
    check(warploom.gemm, (values(3, 4, 8), values(1, 8, 6)), (0, None), "0")


@case
def gradients_of_scales_are_terms_too() -> None:
    wide = torch.float32
    rows, columns = values(7, dtype=wide), values(1, 9, dtype=wide)

    def scaled(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, scale_a=x, scale_b=y, activation="silu", out_dtype=wide)

    for places, expected in (((0, None, 0, None), "0"), ((None, 1, None, 1), "1")):
        check(scaled, (values(7, 16), values(16, 9), rows, columns), places, expected)


@case
def a_weight_is_gathered_rather_than_a_larger_input() -> None:
    found = warploom.gemm(shared(values(64, 16), 0), shared(values(16, 8), 1))
    assert place_of(found) == "0"


@case
def out_is_written_where_it_lies() -> None:
    a, b = values(7, 16, grad=False), values(16, 9, grad=False)
    want = warploom.gemm(a, b)
    out = shared(torch.full_like(want, torch.nan), 0)
    assert warploom.gemm(shared(a, 0), shared(b, None), out=out) is out
    torch.testing.assert_close(out.full_tensor(), want)
    out = shared(torch.full_like(want, torch.nan), 1)
    warploom.gemm(shared(a, 0), shared(b, None), out=out)  # b is cut where it is
    torch.testing.assert_close(out.full_tensor(), want)


@case
def the_largest_magnitude_is_that_of_all_shards() -> None:
    a, b = values(7, 16, grad=False), values(16, 9, grad=False)
    amax, whole = torch.zeros(1), shared(torch.zeros(1), None)
    warploom.gemm(a, b, amax=amax)
    warploom.gemm(shared(a, 0), shared(b, None), amax=whole)
    assert torch.equal(whole.to_local(), amax)


@case
def gradients_are_added_up_where_they_lie() -> None:
    for places, place in (((0, None), None), ((None, 1), 1)):
        a, b = values(7, 16), values(16, 9)
        gradient = torch.randn(7, 9).bfloat16()
        into = torch.ones(16, 9)
        warploom.gemm(a, b, accumulate_into=into).backward(gradient)
        given = [shared(one, at) for one, at in zip((a, b), places, strict=True)]
        sums = shared(torch.ones(16, 9), place)
        found = warploom.gemm(*given, accumulate_into=sums)
        found.backward(shared(gradient, 0 if place is None else 1))
        torch.testing.assert_close(sums.full_tensor(), into)
        assert given[1].grad is None


@case
def a_tensor_of_one_process_is_refused() -> None:
    with_error(lambda: warploom.gemm(shared(values(4, 8), 0), values(8, 8)), "of one process")


def with_error(call: Callable[[], object], told: str) -> None:
    try:
        call()
    except ProblemError as error:
        assert told in str(error)
        return
    raise AssertionError("nothing was refused")


@case
def sums_of_columns_are_terms() -> None:
    from warploom.runtime.families.activation_backward.api import activation_backward

    dy, z = values(5, 7, 9, grad=False), values(5, 7, 9, grad=False)
    want = activation_backward(dy, z, "gelu", sums=True)
    for place, summed in ((0, "terms"), (1, "terms"), (2, "0")):
        given = shared(dy, place), shared(z, place)
        sent, found = moved(lambda given=given: activation_backward(*given, "gelu", sums=True))
        assert (place_of(found[0]), place_of(found[1]), sent) == (str(place), summed, 0)
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


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
def a_fully_sharded_perceptron_trains() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    plain = perceptron()
    module, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (PROCESSES,))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    x = values(
        5, 16, grad=False
    )  # all processes have the same: the mean of gradients is that of one
    want = plain(x)
    y = module(x)
    torch.testing.assert_close(y, want, **LOOSE)
    gradient = torch.randn_like(want)
    y.backward(gradient)
    want.backward(gradient)
    hold(module, plain)


def main(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=60),  # where one process raised, the other waits for it
    )
    devices.reasons[-1] = None  # layers decide as on a GPU; the reference then computes
    failed = {}
    for name, run in CASES.items():
        torch.manual_seed(0)
        try:
            run()
        except Exception:
            failed[name] = traceback.format_exc()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

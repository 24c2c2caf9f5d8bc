"""Bad input is a typed error that names the value, the rule and the fix, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixed_samples import BF16, E4M3, FP32, K, N, random, sample

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedWeight

A, W = random(6, K), sample().packed
W8 = sample(activations="e4m3").packed
OTHER = KernelSpec("sm_90a", GemmOperation("bf16", "bf16", "bf16"), GemmSchedule((128, 8, 64), 2))
CHANNEL = sample("int4", None).packed


def mixed(a: object = A, weight: object = W, **keywords: Any) -> Callable[[], object]:
    return lambda: warploom.mixed_gemm(a, weight, **keywords)


def damaged(**tensors: torch.Tensor) -> PackedWeight:
    return PackedWeight(**{**CHANNEL.tensors(), **tensors}, metadata=CHANNEL.metadata)


def apart() -> torch.Tensor:
    """The bytes of slabs, one byte behind a multiple of 16."""
    room = torch.zeros(CHANNEL.data.numel() + 32, dtype=torch.uint8)
    first = -room.data_ptr() % 16 + 1
    return room[first : first + CHANNEL.data.numel()].view(CHANNEL.data.shape)


# What is called, and words of the message: of the value, the rule and the fix.
PROBLEMS: dict[str, tuple[Callable[[], object], str, str, str]] = {
    "a tensor for a weight": (mixed(weight=A), "<tensor [6, 256]>", "a PackedWeight", "gemm"),
    "no tensor for a": (mixed(a=[1.0]), "a [1.0]", "torch tensor", "as_tensor"),
    "k": (
        mixed(random(6, 128)),
        "a [6, 128] by a packed weight [136, 256]",
        "[.., M, K]",
        "[N, K]",
    ),
    "one dimension": (mixed(random(K)), "a [256]", "[.., M, K]", "a[None]"),
    "fp32": (mixed(A.float()), "a of torch.float32", "fp16, bf16, e4m3, int8", "bfloat16"),
    "packed for 8 bits": (mixed(weight=W8), "'e4m3'", "for '16-bit'", "activations='16-bit'"),
    "packed for 16 bits": (mixed(A.to(E4M3)), "'16-bit'", "for 'e4m3'", "activations='e4m3'"),
    "int32": (mixed(out_dtype=torch.int32), "'int32'", "must be one of fp16", "out_dtype"),
    "devices": (mixed(weight=W.to("meta")), "a on cpu, weight.data on meta", "one device", "move"),
    "out": (mixed(out=torch.zeros(6, 8, dtype=BF16)), "out [6, 8]", "[6, 136]", "out=None"),
    "bias": (mixed(bias=random(8)), "bias of shape [8]", "[136]", "reshape"),
    "bias of batches": (
        mixed(random(2, 6, K), bias=random(2, N)),
        "bias [2, 136] in batches of D [2]",
        "rows of one matrix",
        "residual",
    ),
    "kernel of another family": (
        mixed(spec=OTHER),
        "spec gemm_",
        "mixed_gemm, not of gemm",
        "leave",
    ),
    "another shape of slabs": (
        mixed(weight=damaged(data=CHANNEL.data[:1])),
        "data torch.uint8 [1, 2, 4096]",
        "[3, 2, 4096]",
        "",
    ),
    "scales that are missing": (
        mixed(weight=PackedWeight(CHANNEL.data, CHANNEL.metadata)),
        "tensors data",
        "channel_scales",
        "",
    ),
    "unaligned slabs": (
        mixed(weight=damaged(data=apart())),
        "weight.data",
        "multiple of 16",
        "clone",
    ),
    "the weight's gradient": (
        mixed(weight=damaged(channel_scales=CHANNEL.channel_scales.clone().requires_grad_())),
        "weight.channel_scales that requires grad",
        "must not",
        "dequantize",
    ),
    "out with a gradient": (
        mixed(A.clone().requires_grad_(), out=torch.zeros(6, N, dtype=BF16)),
        "out",
        "differentiates",
        "no_grad",
    ),
    "beta": (mixed(beta=2.0), "beta 2.0", "residual", "leave it out"),
    "scale": (mixed(scale_d=float("inf")), "scale_d inf", "finite", "tensor"),
    "activation": (mixed(activation="tanh"), "activation 'tanh'", "relu, gelu", "use one"),
    "memory": (
        lambda: warploom.mixed_gemm(A[:, :N], sample(k=128).packed, out=A[:, N:]),
        "a [6, 136]",
        "",
        "",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_names_the_value_the_rule_and_the_fix(name: str) -> None:
    call, value, rule, fix = PROBLEMS[name]
    with pytest.raises(ProblemError) as raised:
        call()
    told = raised.value
    assert value in told.value and rule in told.rule and fix in told.fix


def test_out_must_lie_apart_from_what_is_read() -> None:
    room = torch.zeros(6, 2 * K, dtype=BF16)
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.mixed_gemm(room[:, :K], W, out=room[:, K - 8 : K - 8 + N])


def test_a_dual_tensor_is_refused() -> None:
    from torch.autograd import forward_ad

    with forward_ad.dual_level(), pytest.raises(ProblemError, match="forward-mode"):
        dual = forward_ad.make_dual(A.float(), A.float()).to(BF16)
        warploom.mixed_gemm(dual, W)


def test_results_of_fp32_need_no_word_of_it() -> None:
    assert warploom.mixed_gemm(A, W, out=torch.zeros(6, N)).dtype == FP32

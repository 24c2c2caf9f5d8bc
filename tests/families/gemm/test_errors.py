"""Bad input is a typed error that names the value, the rule and the fix, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError, UnknownNameError, WarploomError
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec

BF16 = torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


SCALAR = torch.zeros(1, 1)
A, B, OUT = zeros(6, 16), zeros(8, 16).t(), zeros(6, 8)
WIDE = zeros(20, 16)
BATCHED = zeros(2, 6, 16), zeros(2, 16, 8)
INT8 = {"a": zeros(6, 16, dtype=torch.int8), "b": zeros(8, 16, dtype=torch.int8).t()}
SPEC = KernelSpec("sm_90a", GemmOperation("bf16", "bf16", "bf16"), GemmSchedule((128, 8, 64), 2))


def gemm(a: torch.Tensor = A, b: torch.Tensor = B, **keywords: Any) -> Callable[[], object]:
    return lambda: warploom.gemm(a, b, **keywords)


# What is called, and words of the message: of the value, the rule and the fix.
PROBLEMS: dict[str, tuple[Callable[[], object], str, str, str]] = {
    "shapes": (gemm(b=zeros(15, 8)), "a [6, 16] by b [15, 8]", "[.., K, N], with one K", ".t()"),
    "vector a": (gemm(a=zeros(16)), "a [16]", "a is [.., M, K]", ".t()"),
    "vector b": (gemm(b=zeros(16)), "b [16]", "b is [.., K, N]", ".t()"),
    "batches": (
        gemm(zeros(2, 6, 16), zeros(3, 16, 8)),
        "a [2, 6, 16] by b [3, 16, 8]",
        "batches that broadcast",
        ".t()",
    ),
    "types differ": (gemm(b=B.half()), "torch.float16", "one type", "convert"),
    "fp32 operands": (
        gemm(A.float(), B.float()),
        "a of torch.float32",
        "fp16, bf16, e4m3, e5m2, int8",
        'precision="fp32"',
    ),
    "fp64 operands": (gemm(A.double(), B.double()), "torch.float64", "element types", ".to("),
    "devices": (gemm(b=B.to("meta")), "b on meta", "one device", "move"),
    "fp64 result": (
        gemm(out_dtype=torch.float64),
        "out_dtype torch.float64",
        "must be a torch.dtype",
        "bfloat16",
    ),
    "int64 result": (
        gemm(out=OUT.long()),
        "out of torch.int64",
        "element types",
        ".to(",
    ),
    "accumulation": (
        gemm(accumulation="slow"),
        "use_fast_accum 'slow'",
        "True or False",
        "boolean",
    ),
    "promoted of int8": (
        gemm(**INT8, accumulation="promoted"),
        "promoted of int8",
        "must be fast",
        "convert",
    ),
    "int32 of bf16": (gemm(out_dtype=torch.int32), "int32", "for int8 operands", "out_dtype"),
    "int32 with epilogue": (
        gemm(**INT8, out_dtype=torch.int32, activation="relu"),
        "int32",
        "without epilogue",
        "out_dtype",
    ),
    "out shape": (gemm(out=zeros(8, 6)), "out [8, 6]", "must be [6, 8]", "out=None"),
    "out type": (gemm(out=OUT.half(), out_dtype=BF16), "torch.float16", "bfloat16", "out=None"),
    "out column-major": (gemm(out=zeros(8, 6).t()), "[1, 6]", "contiguous last", "row-major"),
    "out expanded": (gemm(out=zeros(1, 8).expand(6, 8)), "[0, 1]", "one address", "expanded"),
    "out pitches": (
        gemm(zeros(2, 3, 16), out=zeros(2, 4, 8)[:, :3]),
        "[32, 8, 1]",
        "one stride",
        "row-major",
    ),
    "out batches": (
        gemm(*BATCHED, out=zeros(3, 6, 8)),
        "[3, 6, 8]",
        "must be [2, 6, 8]",
        "out=None",
    ),
    "out of one batch": (
        gemm(*BATCHED, out=zeros(1, 6, 8).expand(2, 6, 8)),
        "[0, 8, 1]",
        "one address",
        "expanded",
    ),
    "out of batches that overlap": (
        gemm(*BATCHED, out=zeros(64).as_strided((2, 6, 8), (8, 8, 1))),
        "[8, 8, 1]",
        "one address",
        "expanded",
    ),
    "out of batches in another order": (
        gemm(zeros(2, 3, 6, 16), zeros(2, 3, 16, 8), out=zeros(3, 2, 6, 8).transpose(0, 1)),
        "[48, 96, 8, 1]",
        "one between batches",
        "row-major",
    ),
    "out is a": (
        gemm(WIDE[:6], zeros(16, 16), out=WIDE[5:11]),
        "and a at",
        "do not overlap",
        "another out",
    ),
    "out is b": (gemm(zeros(6, 16), WIDE[:16], out=WIDE[10:16]), "and b at", "overlap", "another"),
    "out is bias": (gemm(bias=OUT[0], out=OUT), "and bias at", "overlap", "another out"),
    "out touches residual": (
        gemm(zeros(6, 16), zeros(16, 16), out=WIDE[:6], residual=WIDE[1:7]),
        "and residual at",
        "exactly the residual",
        "another out",
    ),
    "beta inf": (gemm(residual=OUT, beta=float("inf")), "beta inf", "finite", "scale"),
    "beta nan": (gemm(residual=OUT, beta=float("nan")), "beta nan", "finite", "scale"),
    "beta text": (gemm(epilogue=[("residual", OUT, "1")]), "beta '1'", "finite", "scale"),
    "bias shape": (gemm(bias=zeros(6)), "bias of shape [6]", "[8] here", "reshape"),
    "bias type": (gemm(bias=zeros(8, dtype=torch.int8)), "torch.int8", "fp16, bf16", "convert"),
    "bias stride": (gemm(bias=zeros(16)[::2]), "[2]", "contiguous", ".contiguous()"),
    "bias list": (gemm(epilogue=[("bias", [0.0] * 8)]), "bias [0.0", "must be a tensor", "torch"),
    "residual shape": (gemm(residual=zeros(1, 8)), "[1, 8]", "[6, 8] here", "reshape"),
    "scale length": (gemm(scale_a=torch.zeros(5)), "[5]", "[6] here", "reshape"),
    "scale type": (gemm(scale_b=zeros(8)), "bfloat16", "must be fp32", ".float()"),
    "scale text": (gemm(epilogue=[("scale", "2")]), "scale '2'", "a number", "tensor"),
    "bias of other batches": (
        gemm(*BATCHED, bias=zeros(3, 8)),
        "bias of shape [3, 8]",
        "[8] here, or of that in batches of D [2]",
        "reshape",
    ),
    "bias of batches that D has not": (gemm(bias=zeros(2, 8)), "[2, 8]", "[8] here", "reshape"),
    "bias of some batches": (
        gemm(zeros(2, 3, 6, 16), zeros(2, 3, 16, 8), bias=zeros(2, 1, 8)),
        "bias of shape [2, 1, 8]",
        "batches of D [2, 3] at one stride, or none",
        ".contiguous()",
    ),
    "residual of other batches": (
        gemm(*BATCHED, residual=zeros(3, 6, 8)),
        "residual of shape [3, 6, 8]",
        "batches of D [2]",
        "reshape",
    ),
    "scale of other batches": (
        gemm(*BATCHED, scale_a=torch.zeros(3, 6)),
        "[3, 6]",
        "[6] here, or of that in batches of D [2]",
        "reshape",
    ),
    "scale of the result": (gemm(scale_d=torch.zeros(8)), "[8]", "one element", "reshape"),
    "amax number": (gemm(amax=0.0), "amax 0.0", "must be a tensor", "torch tensor"),
    "amax shape": (gemm(amax=torch.zeros(2)), "amax of shape [2]", "one element", "reshape"),
    "amax type": (gemm(amax=zeros(1)), "torch.bfloat16", "must be fp32", ".float()"),
    "out is amax": (
        gemm(zeros(1, 16), zeros(16, 1), out=SCALAR, amax=SCALAR),
        "and amax at",
        "overlap",
        "another out",
    ),
    "amax in int32": (
        gemm(**INT8, out_dtype=torch.int32, amax=torch.zeros(1)),
        "int32",
        "without epilogue",
        "out_dtype",
    ),
    "activation": (gemm(activation="tanh"), "'tanh'", "relu, gelu, gelu_tanh, silu", "apply it"),
    "two epilogues": (
        gemm(bias=zeros(8), epilogue=[("activation", "relu")]),
        "epilogue=",
        "one fixed order",
        "into the list",
    ),
    "unknown item": (gemm(epilogue=[("offset", 1.0)]), "offset", "kind one of", "for example"),
    "short item": (gemm(epilogue=[("bias",)]), "length 1", "(kind, value)", "for example"),
    "empty item": (gemm(epilogue=[()]), "length 0", "(kind, value)", "for example"),
    "residual without beta": (gemm(epilogue=[("residual", OUT)]), "length 2", "beta", "1.0"),
    "nine steps": (gemm(epilogue=[("activation", "relu")] * 9), "9 steps", "at most 8", ""),
    "grad of amax": (gemm(amax=torch.zeros(1).requires_grad_()), "amax", "an output", "detach"),
    "grad with out": (gemm(A.clone().requires_grad_(), out=OUT), "out with", "not seen", "no_grad"),
    "out with grad": (gemm(out=OUT.clone().requires_grad_()), "out with", "not seen", "no_grad"),
    "spec of another operation": (gemm(A.half(), B.half(), spec=SPEC), SPEC.name, "fp16", "leave"),
    "spec that cannot store": (gemm(b=zeros(7, 16).t(), spec=SPEC), SPEC.name, "TMA", "direct"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_problem_that_cannot_be_computed_says_why_and_what_to_do(case: str) -> None:
    call, value, rule, fix = PROBLEMS[case]
    with pytest.raises(ProblemError) as caught:
        call()
    assert value in caught.value.value
    assert rule in caught.value.rule
    assert fix in caught.value.fix
    assert all((caught.value.value, caught.value.rule, caught.value.fix))


NAMES = {
    "no name": ("tuned", "family_arch_operation", "warploom list"),
    "another digest": (SPEC.name[:-8] + "0" * 8, f"digest is {SPEC.digest[:8]}", SPEC.name),
    "illegal fields": (SPEC.name.replace("128x8x64", "128x9x64"), "tile n 9", ""),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_kernel_that_does_not_exist_is_not_run(case: str) -> None:
    name, rule, fix = NAMES[case]
    for call in (
        lambda: warploom.gemm(A, B, spec=name),
        lambda: warploom.plan(A, B, spec=name),
        lambda: warploom.load(name),
    ):
        with pytest.raises(UnknownNameError) as caught:
            call()
        assert repr(name) in caught.value.value
        assert rule in caught.value.rule
        assert fix in caught.value.fix


def test_a_call_that_fails_leaves_no_plan_and_no_mark_on_out() -> None:
    out = torch.full((6, 8), 3.0, dtype=BF16)
    before = warploom.counters.as_dict()
    for keywords in ({"bias": zeros(6)}, {"residual": out[:5], "beta": 1.0}):
        with pytest.raises(WarploomError):
            warploom.gemm(A, B, out=out, **keywords)
    assert warploom.counters.as_dict() == before
    assert (out == 3.0).all()

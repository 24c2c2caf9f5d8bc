"""A few tiny products, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

from typing import Any

import gemm_cases as cases
import gemm_wider as wider
import torch
from processes import verify_each

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import reference

M, N, K = 131, 136, 200
KERNELS = [cases.SIMPLE["tma"], cases.SIMPLE["direct"], cases.SIMPLE["layer"], cases.LAYOUTS[3]]
KERNELS += [wider.SWAPPED[1], cases.SPLIT[0], wider.BATCHED[0], cases.SIMPLE["trained"]]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on the GPU and compare with the reference on the CPU."""
    dtype = torch.float16 if "_fp16_" in kernel.name else torch.bfloat16
    a, b = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype).t()
    listed: list[tuple[Any, ...]] = []
    if kernel is cases.SIMPLE["layer"]:
        bias, residual = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)
        listed = [("scale", torch.rand(1)), ("bias", bias), ("activation", "gelu_tanh")]
        listed.append(("residual", residual, 0.5))
    if kernel is cases.SIMPLE["trained"]:
        listed = [("preactivation", torch.zeros(M, N)), ("column_sum", torch.zeros(N))]
    there = [(kind, *(_there(value) for value in values)) for kind, *values in listed]
    out = torch.zeros(M, N, dtype=dtype).cuda()
    d = warploom.gemm(a.cuda(), b.cuda(), epilogue=there, out=out, spec=kernel).cpu()
    exact, bound = reference.gemm_bound(a, b, listed, dtype)
    assert ((d.double() - exact).abs() <= bound).all(), kernel.name


def _there(value: object) -> object:
    return value.cuda() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    verify_each(verify, KERNELS)

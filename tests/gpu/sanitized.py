"""A few tiny kernels, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

from typing import Any

import attention_cases
import cases
import torch

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime import attention_reference, reference
from warploom.runtime.attention_mask import Band

M, N, K = 131, 136, 200
KERNELS = [cases.SIMPLE["tma"], cases.SIMPLE["direct"], cases.SIMPLE["layer"], cases.LAYOUTS[3]]
KERNELS += [cases.SWAPPED[1], cases.BATCHED[0]]
ATTENTIONS = ("none", "causal", "packed", "dynamic")


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on the GPU and compare with the reference on the CPU."""
    dtype = torch.float16 if "_fp16_" in kernel.name else torch.bfloat16
    a, b = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype).t()
    listed: list[tuple[Any, ...]] = []
    if kernel is cases.SIMPLE["layer"]:
        bias, residual = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)
        listed = [("scale", torch.rand(1)), ("bias", bias), ("activation", "gelu_tanh")]
        listed.append(("residual", residual, 0.5))
    there = [(kind, *(_there(value) for value in values)) for kind, *values in listed]
    out = torch.zeros(M, N, dtype=dtype).cuda()
    d = warploom.gemm(a.cuda(), b.cuda(), epilogue=there, out=out, spec=kernel).cpu()
    exact, bound = reference.gemm_bound(a, b, listed, dtype)
    assert ((d.double() - exact).abs() <= bound).all(), kernel.name


def verify_attention(name: str) -> None:
    """Run one attention kernel on the GPU, two sequences, and compare with the CPU's float64."""
    kernel, dim, seq = attention_cases.SIMPLE[name], 64, 131
    q, k, v = (torch.randn(2, heads, seq, dim).bfloat16() for heads in (4, 2, 2))
    keywords: dict[str, Any] = {"spec": kernel, "causal": "top_left" if name != "none" else False}
    given = [q.cuda(), k.cuda(), v.cuda()]
    if name == "packed":
        given = [tensor.transpose(1, 2).flatten(0, 1).contiguous().cuda() for tensor in (q, k, v)]
        offsets = torch.tensor([0, seq, 2 * seq], dtype=torch.int32).cuda()
        keywords |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        keywords |= {"max_seqlen_q": seq, "max_seqlen_k": seq}
    out = warploom.attention(*given, **keywords).cpu()
    if name == "packed":
        out = out.unflatten(0, (2, seq)).transpose(1, 2)
    band = Band() if name == "none" else Band(right=0)
    function = attention_reference.Function(dim**-0.5, band=band)
    exact, _ = attention_reference.exact(q, k, v, function)
    bound, _ = attention_reference.bound(q, k, v, function)
    assert ((out.double() - exact).abs() <= bound).all(), kernel.name


def _there(value: object) -> object:
    return value.cuda() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in KERNELS:
        verify(each)
    for name in ATTENTIONS:
        verify_attention(name)
    print(f"verified {len(KERNELS) + len(ATTENTIONS)} kernels")

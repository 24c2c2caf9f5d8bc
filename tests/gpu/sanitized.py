"""A few tiny kernels of a family, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import attention_backward_cases
import attention_cases
import cases
import torch

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.problem import Call
from warploom.runtime.families.attention_backward import reference as attention_backward_reference
from warploom.runtime.families.attention_backward.plan import attention_backward
from warploom.runtime.families.attention_backward.problem import BackwardCall
from warploom.runtime.families.attention_backward.reference import Tensors
from warploom.runtime.families.attention_forward import reference as attention_reference
from warploom.runtime.families.gemm import reference

M, N, K = 131, 136, 200
KERNELS = [cases.SIMPLE["tma"], cases.SIMPLE["direct"], cases.SIMPLE["layer"], cases.LAYOUTS[3]]
KERNELS += [cases.SWAPPED[1], cases.SPLIT[0], cases.BATCHED[0]]
ATTENTIONS = ("none", "causal", "packed", "dynamic")
BACKWARDS = ("none", "causal", "packed", "deterministic")
ALL = [
    *KERNELS,
    *(attention_cases.SIMPLE[name] for name in ATTENTIONS),
    *(attention_backward_cases.SIMPLE[name] for name in BACKWARDS),
]


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


def verify_backward(name: str) -> None:
    """Run one backward kernel on the GPU, two sequences, and compare with the CPU's float64."""
    kernel, dim, seq = attention_backward_cases.SIMPLE[name], 64, 131
    function = attention_reference.Function(
        dim**-0.5, band=Band() if name == "none" else Band(right=0)
    )
    q, k, v = (torch.randn(2, heads, seq, dim).bfloat16() for heads in (4, 2, 2))
    results = attention_reference.attention(q, k, v, function)
    given = Tensors(q, k, v, *results, torch.randn(q.shape).bfloat16(), torch.randn(2, 4, seq))
    keywords: dict[str, Any] = {"causal": "top_left" if name != "none" else False}
    there = [getattr(given, field.name).cuda() for field in fields(given)]
    if name == "packed":
        there = [_in_a_row(tensor) for tensor in there]
        offsets = torch.tensor([0, seq, 2 * seq], dtype=torch.int32).cuda()
        keywords |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        keywords |= {"max_seqlen_q": seq, "max_seqlen_k": seq}
    found = attention_backward(
        BackwardCall(Call(*there[:3], **keywords, backward_spec=kernel), *there[3:])
    )
    exact, bound = (
        attention_backward_reference.exact(given, function),
        attention_backward_reference.bound(given, function),
    )
    for one, wanted, allowed in zip(found, exact, bound, strict=True):
        if name == "packed":
            one = one.unflatten(0, (2, seq)).transpose(1, 2)
        assert ((one.cpu().double() - wanted).abs() <= allowed).all(), kernel.name


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Two sequences of a batch as packed ones."""
    if tensor.dim() == 4:
        return tensor.transpose(1, 2).flatten(0, 1).contiguous()
    return tensor.transpose(0, 1).flatten(1, 2).contiguous()


def _there(value: object) -> object:
    return value.cuda() if isinstance(value, torch.Tensor) else value


FAMILIES: dict[str, Callable[[], None]] = {
    "gemm": lambda: _each(verify, KERNELS),
    "attention_forward": lambda: _each(verify_attention, ATTENTIONS),
    "attention_backward": lambda: _each(verify_backward, BACKWARDS),
}


def _each(check: Callable[[Any], None], of: Sequence[Any]) -> None:
    for one in of:
        check(one)
    print(f"verified {len(of)} kernels")


if __name__ == "__main__":
    torch.manual_seed(0)
    FAMILIES[sys.argv[1]]()

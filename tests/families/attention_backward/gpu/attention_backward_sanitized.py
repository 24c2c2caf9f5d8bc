"""A few tiny backward passes, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import attention_backward_cases as cases
import torch
from processes import verify_each

from warploom.runtime.families._attention import reference as forward
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.call import BackwardCall, attention_backward
from warploom.runtime.families.attention_backward.reference import Tensors

KERNELS = ("none", "causal", "packed", "deterministic")


def verify(name: str) -> None:
    """Run one backward kernel on the GPU, two sequences, and compare with the CPU's float64."""
    kernel, dim, seq = cases.SIMPLE[name], 64, 131
    function = forward.Function(dim**-0.5, band=Band() if name == "none" else Band(right=0))
    q, k, v = (torch.randn(2, heads, seq, dim).bfloat16() for heads in (4, 2, 2))
    results = forward.attention(q, k, v, function)
    given = Tensors(q, k, v, *results, torch.randn(q.shape).bfloat16(), torch.randn(2, 4, seq))
    keywords: dict[str, Any] = {"causal": "top_left" if name != "none" else False}
    there = [getattr(given, field.name).cuda() for field in fields(given)]
    if name == "packed":
        there = [_in_a_row(tensor) for tensor in there]
        offsets = torch.tensor([0, seq, 2 * seq], dtype=torch.int32).cuda()
        keywords |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        keywords |= {"max_seqlen_q": seq, "max_seqlen_k": seq}
    found = attention_backward(
        BackwardCall(Arguments(*there[:3], **keywords, backward_spec=kernel), *there[3:])
    )
    exact, bound = (
        reference.exact(given, function),
        reference.bound(given, function),
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


if __name__ == "__main__":
    verify_each(verify, KERNELS)

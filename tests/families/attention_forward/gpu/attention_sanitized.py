"""A few tiny passes of attention, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

from typing import Any

import attention_cases as cases
import torch
from processes import verify_each

import warploom
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import Band

KERNELS = ("none", "causal", "packed", "dynamic")


def verify(name: str) -> None:
    """Run one attention kernel on the GPU, two sequences, and compare with the CPU's float64."""
    kernel, dim, seq = cases.SIMPLE[name], 64, 131
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
    function = reference.Function(dim**-0.5, band=band)
    exact, _ = reference.exact(q, k, v, function)
    bound, _ = reference.bound(q, k, v, function)
    assert ((out.double() - exact).abs() <= bound).all(), kernel.name


if __name__ == "__main__":
    verify_each(verify, KERNELS)

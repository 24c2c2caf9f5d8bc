"""A few small calls, checked on the CPU: what compute-sanitizer watches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fp32_pieces_cases as cases
import torch
from processes import verify_each

from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.fp32_pieces.call import Fp32PiecesCall
from warploom.runtime.families.fp32_pieces.family import FAMILY as RUNTIME

KERNELS = [
    *(cases.spec(threads=threads) for threads in (128, 256)),
    *(cases.spec("bf16", count) for count in (2, 3)),
    *(cases.spec(q, count, "col") for q, count in (("fp16", 2), ("bf16", 3))),
]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on rows that neither warps nor vectors divide."""
    operation: Any = kernel.operation
    x = torch.randn(37, 301) * torch.exp2(torch.randint(-9, 10, (37, 1)).float())
    call = Fp32PiecesCall(x.cuda(), TORCH[operation.q], operation.count, spec=kernel)
    if operation.layout == "col":
        call = replace(call, x=x.t().contiguous().cuda().t())
    found = [one if one is None else one.cpu() for one in plan.run(call)]
    right: Any = RUNTIME.expected(replace(call, x=call.x.cpu()))
    assert RUNTIME.share(tuple(found), right) == 0  # type: ignore[arg-type]


if __name__ == "__main__":
    verify_each(verify, KERNELS)

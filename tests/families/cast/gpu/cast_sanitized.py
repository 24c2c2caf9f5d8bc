"""A few tiny calls, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

from dataclasses import replace

import cast_cases as cases
import torch
from processes import verify_each

from warploom.generator.families.cast import CastOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.cast.call import call_of
from warploom.runtime.families.cast.family import FAMILY as RUNTIME

M, N = 259, 203  # several tiles, whose rows no 16 bytes divide
KERNELS = [
    cases.spec("1x128", transpose=True),
    cases.spec("128x128", transpose=True),
    cases.spec("1x32", transpose=True, rounding="stochastic"),
    cases.spec("1x128", transpose=True, offsets=True),
    cases.spec("row", transpose=True, offsets=True),
    cases.spec("1x128", transpose=True, static=True),
    cases.spec("tensor"),
    cases.spec("tensor", transpose=True),
    cases.spec("1x128"),
    cases.spec("row", cases.CastSchedule(256, 2, "cta")),
    cases.spec("row", cases.CastSchedule(128, 1)),
]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on rows that are aligned, and on some that are not."""
    operation: CastOperation = kernel.operation  # type: ignore[assignment]
    state = torch.tensor([1, 2]) if operation.rounding == "stochastic" else None
    offsets = torch.tensor([100, 100, 250], dtype=torch.int32) if operation.offsets else None
    scales: dict[str, torch.Tensor] = {}
    if operation.static:
        scales = {"scale": torch.rand(M, -(-N // 128)), "scale_t": torch.rand(N, -(-M // 128))}
    for pitch in (N, 208):
        x = torch.randn(M, pitch).to(TORCH[operation.x])
        call = call_of(
            x[:, :N],
            TORCH[operation.q],
            block=operation.block,
            transpose=operation.transpose,
            rounding=operation.rounding,
            rounding_state=state,
            offsets=offsets,
            **scales,
        )
        there = replace(
            call,
            x=x.cuda()[:, :N],
            rounding_state=None if state is None else state.cuda(),
            spec=kernel,
            **({} if offsets is None else {"offsets": offsets.cuda()}),
            **{name: one.cuda() for name, one in scales.items()},  # type: ignore[arg-type]
        )
        results = zip(call.outputs, plan.run(there), RUNTIME.expected(call), strict=True)
        for name, one, right in results:
            if one is None or right is None:
                continue
            if offsets is not None:
                one, right = (cases.of_groups(name, t, 250, 128 + 256) for t in (one, right))
            assert not cases.differ(one.cpu(), right).any()


if __name__ == "__main__":
    verify_each(verify, KERNELS)

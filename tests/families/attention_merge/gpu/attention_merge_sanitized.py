"""A few tiny calls, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

import attention_merge_cases as cases
import torch
from processes import verify_each

from warploom.generator.families.attention_merge import AttentionMergeOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.family import FAMILY as RUNTIME
from warploom.runtime.sampled import share

ROWS = (3, 37)  # that no block divides
KERNELS = [cases.spec(), cases.spec(96, 64, 4), cases.spec(96, 256, 16, cases.TYPES[2])]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on rows that follow each other, and in place."""
    operation: AttentionMergeOperation = kernel.operation  # type: ignore[assignment]
    a, b = (torch.randn(*ROWS, operation.dim).to(TORCH[n]) for n in (operation.a, operation.b))
    given = a, torch.randn(ROWS), b, torch.randn(ROWS)
    exact = RUNTIME.expected(AttentionMergeCall(*given))
    there = [one.cuda() for one in given]
    out, lse = plan.run(AttentionMergeCall(*there, spec=kernel))
    assert share((out.cpu(), lse.cpu()), exact) <= 1
    plan.run(AttentionMergeCall(*there, there[0], there[1], spec=kernel))
    assert share((there[0].cpu(), there[1].cpu()), exact) <= 1


if __name__ == "__main__":
    verify_each(verify, KERNELS)

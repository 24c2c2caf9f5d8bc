"""A few tiny calls, checked on the CPU: what compute-sanitizer watches."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import combine_cases as cases
import torch
from processes import verify_each

from warploom.generator.families.combine import CombineOperation, CombineShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.combine.family import FAMILY as RUNTIME
from warploom.runtime.sampled import share

KERNELS = [cases.spec(128, weights="fp32"), cases.spec(256, **cases.BACK), cases.SMOKE[1]]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on tokens and columns that no CTA divides."""
    operation: CombineOperation = kernel.operation  # type: ignore[assignment]
    call: Any = RUNTIME.draw(
        operation, CombineShape(13, 3, 520), "cpu", torch.Generator().manual_seed(0)
    )
    names = [one.name for one in fields(call)]
    there = {
        name: getattr(call, name).cuda()
        for name in names
        if isinstance(getattr(call, name), torch.Tensor) and "out" not in name
    }
    found = plan.run(type(call)(**there, spec=kernel))
    results = [one.cpu() for one in found if one is not None]
    assert share(results, RUNTIME.expected(replace(call))) <= 1


if __name__ == "__main__":
    verify_each(verify, KERNELS)

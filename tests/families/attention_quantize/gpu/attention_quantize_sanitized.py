"""A few tiny calls, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

from dataclasses import replace

import attention_quantize_cases as cases
from processes import verify_each

from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.attention_quantize.family import FAMILY as RUNTIME

KERNELS = [
    cases.spec(),
    cases.spec(64, "e4m3", "fp16", smooth=False),
    cases.spec(96, "e4m3"),
    cases.spec(256),
    cases.spec(element="e4m3"),
    cases.spec(48, element="e4m3", lengths="packed"),
]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on rows and keys that no tile divides."""
    operation: AttentionQuantizeOperation = kernel.operation  # type: ignore[assignment]
    heads, rows = (4, 37) if operation.quantizes else (0, 0)
    drawn = RUNTIME.draw(operation, AttentionQuantizeShape(2, heads, 2, rows, 300), "cpu", None)
    call = replace(drawn, **dict.fromkeys(drawn.declaration.results))  # type: ignore[arg-type]
    there = {name: one.cuda() for name, one in call.read()}
    results = plan.run(replace(call, **there, spec=kernel))  # type: ignore[arg-type]
    found = tuple(None if one is None else one.cpu() for one in results)
    assert RUNTIME.share(found, call) <= 1


if __name__ == "__main__":
    verify_each(verify, KERNELS)

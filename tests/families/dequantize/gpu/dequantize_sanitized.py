"""A few small calls, checked on the CPU: what compute-sanitizer watches."""

from __future__ import annotations

import dequantize_cases as cases
from processes import verify_each

from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.sampled import differ

KERNELS = [*cases.SOME, *cases.ROWS]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on rows and columns that no slab divides, into memory of its own."""
    made = cases.made(kernel, 2, 37, 256, pad=(1, 0))
    (found,) = plan.run(made.call)
    assert not differ(found.cpu(), made.right.cpu()).any()


if __name__ == "__main__":
    verify_each(verify, KERNELS)

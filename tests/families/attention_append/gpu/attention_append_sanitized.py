"""A few tiny calls, checked on the CPU: what compute-sanitizer watches."""

from __future__ import annotations

from dataclasses import replace

import attention_append_cases as cases
from processes import verify_each

from warploom.generator.specification import KernelSpec

KERNELS = [
    cases.spec(cases.FULL),
    cases.spec(replace(cases.PAGED, dim=80, rotary="interleaved")),
    cases.spec(replace(cases.PLAIN, cache="int8", scales="head")),
]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on sequences of which some are full or left out."""
    cases.made(kernel, (3, -1, 47, 48), (2,)).verify()


if __name__ == "__main__":
    verify_each(verify, KERNELS)

"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

from collections.abc import Callable

import activation_backward_cases as cases
from mutants import Checked

from warploom.generator.specification import KernelSpec

KERNEL = cases.spec("gelu_tanh")


def extents(m: int, n: int) -> Callable[[KernelSpec, int], None]:
    """A check of a gradient of these extents."""

    def check(kernel: KernelSpec, seed: int) -> None:
        cases.made(kernel, m, n, seed=seed).verify()

    return check


ADD = "  // Adds up the sums of threads with the same columns, in a fixed order.\n"
PAUSE = "  for (const auto since = clock64(); clock64() - since < 30000;) {}\n"
SYNC = "  __syncthreads();\n  for (int i = threadIdx.x;"
SYNC_PARTS = "  shared[group][lane] = sum;\n  __syncthreads();\n"
ENTRY = "_sums(const __grid_constant__ Parameters p) {\n"
WAIT = "  wait_for_previous_grid();\n"

MUTANTS = {
    "the last row of a part is left out": Checked(
        "at >= last) break;", "at + 1 >= last) break;", extents(8192, 4096), KERNEL
    ),
    "rows are added before all threads have laid down theirs": Checked(
        SYNC,
        SYNC.partition("\n")[2],
        extents(1031, 520),
        KERNEL,
        pauses=((ADD, "  if (threadIdx.x >= 32)\n  " + PAUSE + ADD),),
    ),
    "parts are added before all groups have laid down theirs": Checked(
        SYNC_PARTS,
        SYNC_PARTS.partition("\n")[0] + "\n",
        extents(8192, 4096),
        KERNEL,
        pauses=((SYNC_PARTS, "  if (group > 0)\n  " + PAUSE + SYNC_PARTS),),
    ),
    "parts are added before they are there": Checked(
        ENTRY + WAIT, ENTRY, extents(8192, 4096), KERNEL, pauses=((ADD, PAUSE + ADD),)
    ),
    "parts past the first of each group are left out": Checked(
        "part += kGroups) sum", "part += p.parts) sum", extents(100_003, 64), KERNEL
    ),
}

"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

from collections.abc import Callable

import sparse_gemm_cases as cases
from mutants import PAUSE, Checked

from warploom.generator.specification import KernelSpec

KERNEL = cases.spec(2, 2, 128, 5)
EIGHT = cases.spec(1, 1, 64, 8, element="int8", output="bf16", scaled=True)
SPLIT = cases.spec(1, 1, 64, 8, split_k=2)
BIASED = cases.spec(1, 1, 16, 12, bias=True)


def extents(m: int, n: int, k: int) -> Callable[[KernelSpec, int], None]:
    """A check of a product of these extents."""

    def check(kernel: KernelSpec, seed: int) -> None:
        cases.made(kernel, m, n, k, seed=seed).verify()

    return check


TWICE = (
    "      multiply_stage(k_tile, even, odd);\n      if (++k_tile == p.k_tiles) break;\n"
    "      multiply_stage(k_tile, odd, even);\n"
)
WAIT = '    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");  // all have '
READ = f"{WAIT}staged this chunk\n    CUTE_NO_UNROLL\n"
STAGE = "    CUTE_UNROLL\n    for (int f = 0; f < kChunkRows / 8; ++f) {\n"
FREE = f"{WAIT}read the previous chunk\n"

MUTANTS = {
    "both instructions take the metadata of the first": Checked(
        "Wgmma::fma<1>(", "Wgmma::fma<0>(", extents(130, 300, 640), KERNEL
    ),
    "metadata are those of the rows below": Checked(
        "[stage]) + thread;", "[stage]) + (thread ^ 4);", extents(130, 300, 640), KERNEL
    ),
    "the second instruction multiplies the first values": Checked(
        "+ 2, x + 4", ", x + 4", extents(130, 300, 640), KERNEL
    ),
    "words are loaded into registers of products that still run": Checked(
        TWICE,
        "      multiply_stage(k_tile, even, even);\n",
        extents(300, 1003, 2080),
        KERNEL,
    ),
    "sums of the last tile are not cleared": Checked(
        "k_tile != 0);", "true);", extents(4099, 5000, 160), KERNEL
    ),
    "a bias is that of the row 8 above": Checked(
        "float(p.bias[lower])", "float(p.bias[upper])", extents(9, 130, 96), BIASED
    ),
    "both words of a stage are its first": Checked(
        "words[block][kWords - 1]", "words[block][0]", extents(130, 300, 640), EIGHT
    ),
    "a scale of x is its neighbour's": Checked(
        "lane % 4 * 2 + i, p.m - 1)", "lane % 4 * 2, p.m - 1)", extents(70, 300, 640), EIGHT
    ),
    "a scale of the weight is that of the row 8 above": Checked(
        "p.scale_weight[min(lower, ", "p.scale_weight[min(upper, ", extents(70, 300, 640), EIGHT
    ),
    "the last part of k is left out": Checked(
        "part < p.parts; ++part", "part < p.parts - 1; ++part", extents(70, 300, 640), SPLIT
    ),
    "a part of k begins a stage early": Checked(
        "int k_tile = unit.begin; k_tile < unit.end",
        "int k_tile = unit.begin - (unit.part > 0); k_tile < unit.end - (unit.part > 0)",
        extents(70, 300, 2080),
        SPLIT,
    ),
    "a tile is stored before all warps have staged it": Checked(
        READ,
        "    CUTE_NO_UNROLL\n",
        extents(130, 300, 640),
        KERNEL,
        pauses=((STAGE, "    if (warp == 1)\n  " + PAUSE + STAGE),),
    ),
    "a tile is staged before all warps have stored the last one": Checked(
        FREE,
        "",
        extents(130, 300, 640),
        KERNEL,
        pauses=((READ, READ.replace("    CUTE", "    if (warp == 1)\n  " + PAUSE + "    CUTE")),),
    ),
}

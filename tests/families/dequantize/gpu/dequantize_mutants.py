"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

import dequantize_cases as cases
from mutants import Checked, Edit

from warploom.generator.specification import KernelSpec

INT4 = cases.spec(("int4", 32, "bf16", "16-bit"), slabs=4)
UINT4 = cases.spec(("uint4", None, "bf16", "16-bit"))
ROWS = cases.rows_spec()
NVFP4 = cases.spec(("nvfp4", 16, "e4m3", "16-bit"))


def mutant(wrong: Edit, kernel: KernelSpec = INT4) -> Checked:
    """A kernel that is wrong, on experts that make that show."""

    def check(kernel: KernelSpec, seed: int) -> None:
        cases.made(kernel, 3, 147, 1312, pad=(8, 0), seed=seed).verify()

    return Checked(*wrong, check, kernel)


MUTANTS = {
    "row r + 8 has the scale of row r": mutant(("i % 2 ? group.high()", "i % 2 ? group.low()")),
    "rows past the last are written": mutant(("p.n - row, p.k", "p.n - row + 1, p.k")),
    "columns past the last are written": mutant(
        ("p.k - column, aligned", "p.k - column + 1, aligned")
    ),
    "the last of a CTA's slabs is left out": mutant(
        ("min(kSlabs, p.slabs_of_k - first)", "min(kSlabs - 1, p.slabs_of_k - first)")
    ),
    "experts begin where the first does": mutant(("block / p.row_blocks * p.expert_stride", "0")),
    "a row has the zero point of another": mutant(
        ("p.channel_zeros[row + 8]", "p.channel_zeros[row]"), UINT4
    ),
    "blocks of rows have the scales of the first": mutant(
        ("row0 / kDepth * p.scale_row_stride", "0"), ROWS
    ),
    "rows of e4m3 past the last are written": mutant(
        ("row + j * apart < p.n;", "row + j * apart < p.n + 1;"), ROWS
    ),
    "rows of an expert have the second-level scales of the first": mutant(
        ("int64_t(block) * kRows + warp", "int64_t(block % p.row_blocks) * kRows + warp"), NVFP4
    ),
}

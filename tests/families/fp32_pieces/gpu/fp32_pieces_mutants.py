"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

import fp32_pieces_cases as cases
from mutants import PAUSE, Checked, Edit

from warploom.generator.specification import KernelSpec

ROW, COL = cases.spec("fp16"), cases.spec("fp16", layout="col")
THREE = cases.spec("bf16", 3)
WIDE = cases.spec("bf16", 3, threads=128, spans="wide")
WIDE_COL = cases.spec("bf16", 3, "col", spans="wide")


def mutant(
    wrong: Edit, kernel: KernelSpec, m: int = 130, k: int = 5000, pauses: tuple[Edit, ...] = ()
) -> Checked:
    """A kernel that is wrong, and the size of a matrix that makes that show."""

    def check(kernel: KernelSpec, seed: int) -> None:
        cases.made(kernel, m, k, seed=seed).verify()

    return Checked(*wrong, check, kernel, pauses)


REDUCED = "  __syncthreads();\n  peak = __reduce_max_sync(0xffffffff, peaks["
STAGED = "  __syncthreads();\n  for (int i = threadIdx.x; i < kTile * kVectors"
BEHIND = "  if (threadIdx.x >= 32) " + PAUSE

NEXT = "    __syncthreads();  // before the next tile takes its place\n"
SLOW = "    if (threadIdx.x >= 32) " + PAUSE.lstrip()
COUNTED = "  __syncthreads();\n  if (threadIdx.x == 0) raise_span"
TALLIED = "  __syncthreads();\n  if (threadIdx.x >= 32) return;"

MUTANTS = {
    "zeros past k are small values": mutant(("small - (p.piece_pitch - p.k)", "small"), ROW),
    "values that are read again are never lost": mutant(
        (
            "write(p, more, row, column, factor, level, counts);",
            "Counts others; write(p, more, row, column, factor, level, others);",
        ),
        ROW,
        k=9000,
    ),
    "a warp's values are counted after the row was": mutant(
        (COUNTED, COUNTED.removeprefix("  __syncthreads();\n")),
        ROW,
        pauses=(("  counts.small = ", BEHIND + "  counts.small = "),),
    ),
    "rows of a tile are counted before all warps were": mutant(
        (TALLIED, TALLIED.removeprefix("  __syncthreads();\n")),
        COL,
        pauses=(("    Counts counts;\n", SLOW + "    Counts counts;\n"),),
    ),
    "half of a tile's rows have no say": mutant(
        ("row < kTile; row += 32", "row < 32; row += 32"), COL, m=200
    ),
    "columns of the last tiles have no say": mutant(
        ("& ((1ull << 34) - 1)) + most;", "& ((1ull << 34) - 1));"), COL
    ),
    "bf16 pieces of rows whose scale has two parts": mutant(
        ("p.scale + 2 * int64_t(p.m) + row", "p.scale + row"), WIDE
    ),
    "a tile takes the place of one that is read": mutant(
        (NEXT, ""),
        WIDE_COL,
        m=3000,
        k=3000,
        pauses=(("      Pieces pieces;\n", "  " + SLOW + "      Pieces pieces;\n"),),
    ),
    "values that are read again have no say in the scale": mutant(
        ("peak = max(peak, magnitude(more[i]));", "peak = max(peak, magnitude(more[i]) & 0);"), ROW
    ),
    "a row has the largest magnitude of some of its values": mutant(
        (REDUCED, REDUCED.removeprefix("  __syncthreads();\n")),
        ROW,
        pauses=(
            ("  if (threadIdx.x % 32 == 0) peaks[", BEHIND + "  if (threadIdx.x % 32 == 0) peaks["),
        ),
    ),
    "a tile is written before it was loaded": mutant(
        (STAGED, STAGED.removeprefix("  __syncthreads();\n")),
        COL,
        pauses=(
            ("  if (threadIdx.x < kTile && row0", BEHIND + "  if (threadIdx.x < kTile && row0"),
        ),
    ),
    "the last part has no say in the scale": mutant(
        ("part < p.parts; ++part", "part < p.parts - 1; ++part"), COL
    ),
    "a low piece is the high one": mutant(
        ("rest = finite ? rest - float(rounded) : 0.f;", ";"), THREE
    ),
    "what is between pieces is not written": mutant(
        ("column < p.piece_pitch; column += kStep", "column + 8 < p.k; column += kStep"), THREE
    ),
}

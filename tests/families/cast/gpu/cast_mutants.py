"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

import cast_cases as cases
from mutants import PAUSE, Checked, Edit

from warploom.generator.specification import KernelSpec

BLOCKS = cases.spec("1x128", transpose=True)
SQUARES = cases.spec("128x128", transpose=True)
TENSOR = cases.spec("tensor")
BOTH_ROWS = cases.spec("row", transpose=True)
GATE = cases.spec("1x128", transpose=True, gate="relu")
LONG_ROWS = cases.spec("row", cases.CastSchedule(256, 2, "cta"))
STOCHASTIC = cases.spec("1x128", rounding="stochastic")
GROUPS = cases.spec("1x128", transpose=True, offsets=True)
GIVEN = cases.spec("1x128", transpose=True, static=True)


def mutant(
    wrong: Edit, kernel: KernelSpec, m: int = 300, n: int = 520, pauses: tuple[Edit, ...] = ()
) -> Checked:
    """A kernel that is wrong, and the size of a matrix that makes that show."""

    def check(kernel: KernelSpec, seed: int) -> None:
        cases.made(kernel, m, n, seed=seed).verify()

    return Checked(*wrong, check, kernel, pauses)


SCALED = "  __syncthreads();\n  scale_rows(p, shared, row0, column0);\n  __syncthreads();\n"
PEAKS = "  write(&shared.peaks[0]"
FACTOR = "    shared.factors[side][block][row] = factor;\n"
MAGNITUDES = (
    "  __syncthreads();  // largest magnitudes are read, which are where the transpose will be\n"
)
STORED = "  __syncthreads();\n  store_transposed(p, shared, row0, column0);\n"
BEHIND = "  if (threadIdx.x >= 32) " + PAUSE
READ = "  read_scales(p, shared, row0, column0);\n"
SHARED = "  value = shared[threadIdx.x % kWarps];\n"

MUTANTS = {
    "the scale is the one of the row beside": mutant(
        wrong=("scales[(above + row) * scales_down", "scales[(above + (row ^ 1)) * scales_down"),
        kernel=BLOCKS,
        m=256,
    ),
    "a row is the one 8 rows on": mutant(
        wrong=("p.x + row * p.x_pitch", "p.x + (row + 8) % p.m * p.x_pitch"),
        kernel=BLOCKS,
        m=256,
    ),
    "rows and columns have the largest magnitude of some of their values": mutant(
        wrong=(SCALED, SCALED.removeprefix("  __syncthreads();\n")),
        kernel=BLOCKS,
        pauses=((PEAKS, BEHIND + PEAKS),),
    ),
    "values are multiplied before all factors are there": mutant(
        wrong=(SCALED, SCALED.removesuffix("  __syncthreads();\n")),
        kernel=BLOCKS,
        pauses=((FACTOR, BEHIND + FACTOR),),
    ),
    "the transpose is stored before all threads have written theirs": mutant(
        wrong=(STORED, STORED.partition("\n")[2]),
        kernel=BLOCKS,
        pauses=(("  const float* factors_t", BEHIND + "  const float* factors_t"),),
    ),
    "the transpose overwrites largest magnitudes that are still read": mutant(
        wrong=(MAGNITUDES, ""),
        kernel=SQUARES,
        pauses=((SHARED, BEHIND + SHARED),),
    ),
    "the transpose of squares is stored before all threads have written theirs": mutant(
        wrong=(STORED, STORED.partition("\n")[2]),
        kernel=SQUARES,
        pauses=((MAGNITUDES, BEHIND + MAGNITUDES),),
    ),
    "rows have the largest magnitude of all parts but the first": mutant(
        wrong=("for (int i = 0; i < parts; ++i)", "for (int i = 1; i < parts; ++i)"),
        kernel=BOTH_ROWS,
    ),
    "a gate is multiplied by itself": mutant(
        wrong=("*= value_of(up[i], j);", "*= value_of(gate[i], j);"), kernel=GATE
    ),
    "the last part of a tensor has no largest magnitude": mutant(
        wrong=(
            "piece < pieces ? p.n - column : 0, is_aligned",
            "piece + 1 < pieces ? p.n - column : 0, is_aligned",
        ),
        kernel=TENSOR,
    ),
    "a row has the largest magnitude of some of its warps": mutant(
        wrong=("  __syncthreads();\n" + SHARED, SHARED),
        kernel=LONG_ROWS,
        n=8200,
        pauses=(
            (
                "  if (threadIdx.x % 32 == 0) shared[",
                "  if (threadIdx.x >= 32) " + PAUSE + "  if (threadIdx.x % 32 == 0) shared[",
            ),
        ),
    ),
    "the second vector of a row is the first": mutant(
        wrong=("use(vectors[i], first + i * kStep)", "use(vectors[0], first + i * kStep)"),
        kernel=LONG_ROWS,
        n=8200,
    ),
    "a block of scales has rows of the next group": mutant(
        wrong=("  p.m = at.end;  // past which x counts as zeros\n", ""), kernel=GROUPS
    ),
    "groups have no rows of zeros between them": mutant(
        wrong=("before = side == 0 ? column0 : column_t;", "before = side == 0 ? column0 : row0;"),
        kernel=GROUPS,
    ),
    "given scales are read before all threads have written theirs": mutant(
        wrong=("  __syncthreads();\n  const float* factors =", "  const float* factors ="),
        kernel=GIVEN,
        pauses=((READ, BEHIND + READ),),
    ),
    "x.T has the given scales of x": mutant(
        wrong=("side == 0 ? p.scale : p.scale_t;", "p.scale;"), kernel=GIVEN, m=256, n=256
    ),
    "x.T has the given scales of other rows of x": mutant(
        wrong=("before = side == 0 ? column0 : row0;", "before = column0;"), kernel=GIVEN, m=520
    ),
    "random numbers come twice": mutant(
        wrong=("(column / 8 + i) ^ state.y", "(column / 8) ^ state.y"), kernel=STOCHASTIC
    ),
}

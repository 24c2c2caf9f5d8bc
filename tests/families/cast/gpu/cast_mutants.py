"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

import cast_cases as cases
from mutants import PAUSE, Checked, Edit

from warploom.generator.specification import KernelSpec

BLOCKS = cases.spec("1x128", transpose=True)
SQUARES = cases.spec("128x128", transpose=True)
TENSOR = cases.spec("tensor")
LONG_ROWS = cases.spec("row", cases.CastSchedule(256, 2, "cta"))
STOCHASTIC = cases.spec("1x128", transpose=True, rounding="stochastic")


def mutant(
    wrong: Edit, kernel: KernelSpec, m: int = 300, n: int = 520, pauses: tuple[Edit, ...] = ()
) -> Checked:
    """A kernel that is wrong, and the size of a matrix that makes that show."""

    def check(kernel: KernelSpec, seed: int) -> None:
        cases.made(kernel, m, n, seed=seed).verify()

    return Checked(*wrong, check, kernel, pauses)


LOAD = "  const bool is_aligned = aligned(p.x, p.x_pitch);\n  CUTE_UNROLL\n"
LOAD += "  for (int i = 0; i < kTile * kChunks"
WAIT = '  asm volatile("cp.async.commit_group;\\ncp.async.wait_all;" ::: "memory");\n'
PEAKS = "  *reinterpret_cast<float2*>(&shared.peaks[part][column])"
SHUT = "make_float2(peaks[0], peaks[1]);\n  __syncthreads();\n"
QUANTIZED = "  quantize_transposed(p, shared, random, row0, column0);\n  __syncthreads();\n"
READ = "  __syncthreads();  // x of the tile is read: the transpose lies where it was\n"
TURNED = "  transpose(shared.q, q_t);\n  __syncthreads();\n"
VALUES = "  float factors[2];\n"
SHARED = "  value = shared[threadIdx.x % kWarps];\n"

MUTANTS = {
    "the scale is the one of the row beside": mutant(
        wrong=("p.scale[(row0 + row) * p.scale_down", "p.scale[(row0 + (row ^ 1)) * p.scale_down"),
        kernel=BLOCKS,
        m=256,
    ),
    "a row is the one 8 rows on": mutant(
        wrong=("read(shared, vector, row, lane)", "read(shared, vector, (row + 8) % kTile, lane)"),
        kernel=BLOCKS,
    ),
    "the tile is read before all threads have loaded theirs": mutant(
        wrong=(WAIT + "  __syncthreads();\n", WAIT),
        kernel=BLOCKS,
        pauses=((LOAD, "  if (threadIdx.x >= 32) " + PAUSE + LOAD),),
    ),
    "columns have the largest magnitude of some of their rows": mutant(
        wrong=(SHUT, SHUT.partition("\n")[0] + "\n"),
        kernel=BLOCKS,
        pauses=((PEAKS, "  if (part > 0) " + PAUSE + PEAKS),),
    ),
    "the transpose is stored before all threads have written theirs": mutant(
        wrong=(QUANTIZED, QUANTIZED.partition("\n")[0] + "\n"),
        kernel=BLOCKS,
        pauses=((VALUES, "  if (part > 0) " + PAUSE + VALUES),),
    ),
    "the transpose overwrites x that is still read": mutant(
        wrong=(READ, ""),
        kernel=SQUARES,
        pauses=(
            (
                "    random.draw(row0 + row, column, 0);\n",
                "    random.draw(row0 + row, column, 0);\n    if (threadIdx.x >= 32) " + PAUSE,
            ),
        ),
    ),
    "the transpose of squares is stored before all threads have written theirs": mutant(
        wrong=(TURNED, TURNED.partition("\n")[0] + "\n"),
        kernel=SQUARES,
        pauses=((TURNED, "  if (threadIdx.x >= 32) " + PAUSE + TURNED),),
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
    "random numbers come twice": mutant(
        wrong=("(column / 8 + i) ^ state.y", "(column / 8) ^ state.y"), kernel=STOCHASTIC
    ),
}

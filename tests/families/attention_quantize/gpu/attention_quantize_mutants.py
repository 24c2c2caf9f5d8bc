"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attention_quantize_cases as cases
from mutants import PAUSE, Checked

from warploom.generator.specification import KernelSpec
from warploom.runtime import kept

KERNEL = cases.spec()
PLAIN = cases.spec(64, "e4m3", "fp16", smooth=False)
RAGGED = cases.spec(96)
ALONE = cases.spec(element="e4m3")
PACKED = cases.spec(element="e4m3", lengths="packed")


@contextmanager
def counted() -> Iterator[None]:
    """What CTAs count by is zeros before, whatever a mutant left there, and after."""
    kept._found.clear()
    try:
        yield
    finally:
        kept._found.clear()


def plain(kernel: KernelSpec, seed: int) -> None:
    """Rows and keys that no tile divides, and heads that share one of k; twice, as counts last."""
    with counted():
        for add in (0, 10):
            cases.made(kernel, 2, 4, 2, 201, 1031, pad=16, seed=seed + add).verify()


def far(kernel: KernelSpec, seed: int) -> None:
    """k with a mean that is larger than what is left without it."""
    with counted():
        cases.made(kernel, 1, 2, 2, 10, 300, seed=seed, mean=500.0).verify()


WRITE = "    if (lane < kParts) codes["
WRITTEN = "  CUTE_UNROLL\n  for (int j = 0; j < kEach / 4; ++j)\n"  # where rows' sums are
SUMS = "  if (threadIdx.x < kDim) {\n    float sum = 0.f;\n    CUTE_UNROLL\n    for (int row"
READ = "  __syncthreads();\n  // A warp has 16 rows of the transpose"

MUTANTS = {
    "slots have their keys in plain order": Checked(
        "{2 * i, 2 * i + 1, 8 + 2 * i, 8 + 2 * i + 1}",
        "{4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3}",
        plain,
        ALONE,
    ),
    "bytes of two columns are exchanged": Checked(
        "columns[2][i] = __byte_perm(low[0]".replace("low", "high"),
        "columns[2][i] = __byte_perm(low[0]",
        plain,
        KERNEL,
    ),
    "the transpose is read before all threads have written theirs": Checked(
        READ,
        "  // A warp has 16 rows of the transpose",
        plain,
        KERNEL,
        pauses=((WRITE, "    if (threadIdx.x >= 32) " + PAUSE.strip() + "\n" + WRITE),),
    ),
    "what is past the last key is 1": Checked(
        "(from)[i] : make_uint4(0, 0, 0, 0)",
        "(from)[i] : make_uint4(0x3f803f80, 0, 0, 0)",
        plain,
        KERNEL,
    ),
    "keys past the last count in the largest magnitude": Checked(
        "if (row0 + i * kRows >= p.seq_k) continue;", "", far, KERNEL
    ),
    "a tile has the largest magnitude of a warp": Checked(
        "peak = largest_of_cta(peak);\n  const float factor = factor_of<Scores>(peak);",
        "peak = largest<32>(peak);\n  const float factor = factor_of<Scores>(peak);",
        plain,
        PLAIN,
    ),
    "the last chunk is left out of the mean": Checked(
        "chunk < p.chunks; chunk += kSlices", "chunk + 1 < p.chunks; chunk += kSlices", far, KERNEL
    ),
    "the last chunk is left out of the largest magnitude of v": Checked(
        "chunk < p.chunks; chunk += kThreads",
        "chunk + 1 < p.chunks; chunk += kThreads",
        plain,
        PLAIN,
    ),
    "a sequence begins where the one before ends": Checked(
        "int64_t(kTile - 1) * sequence", "int64_t(0)", plain, PACKED
    ),
    "keys past the end of a sequence are those of the next": Checked(
        "min(p.cu_seqlens[low + 1], p.seq_k)", "p.seq_k", plain, PACKED
    ),
    "the first CTA of a head puts all chunks together": Checked(
        "p.chunks - 1) == p.chunks - 1;", "p.chunks - 1) == 0;", plain, KERNEL
    ),
    "how many chunks are done is not left as zeros": Checked(
        "atomicInc(p.arrivals + group, p.chunks - 1)",
        "atomicAdd(p.arrivals + group, 1)",
        plain,
        KERNEL,
    ),
    "columns are summed before all rows have been": Checked(
        "  __syncthreads();\n" + SUMS,
        SUMS,
        plain,
        KERNEL,
        pauses=((WRITTEN, "  if (threadIdx.x >= 32) " + PAUSE.strip() + "\n" + WRITTEN),),
    ),
    "the mean is of whole chunks": Checked(
        "float(p.seq_k)", "float(p.chunks * kChunk)", plain, KERNEL
    ),
    "a row of q has the scale of the row beside": Checked(
        "p.q_descale[scale]", "p.q_descale[scale ^ 1]", plain, KERNEL
    ),
    "a head of q has the mean of another of k": Checked(
        "coord.head / (p.heads / p.kv_heads)", "coord.head % p.kv_heads", plain, KERNEL
    ),
    "every head of v has the factor of the first": Checked(
        "__ldcg(p.v_factor + group)", "__ldcg(p.v_factor)", plain, PLAIN
    ),
    "rows past the last are written": Checked(
        "row >= p.seq_q) continue", "row > p.seq_q) continue", plain, KERNEL
    ),
    "threads past the end of a row write": Checked(
        "lane >= kParts || key", "lane > kParts || key", plain, RAGGED
    ),
}

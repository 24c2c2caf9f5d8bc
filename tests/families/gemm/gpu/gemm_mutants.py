"""Runs a kernel without one of its barriers until a result is wrong: `mutant.py NAME`.

Exit status 0: a result was wrong, as it must be. 1: every result was right, so that the tests would
not notice if the barrier were forgotten.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import gemm_arena as arena
import gemm_cases as cases
import gemm_wider as wider
import torch
from gemm_rounded import assert_rounded_as_the_reference

from warploom.errors import DeviceError
from warploom.generator import nvrtc
from warploom.generator.epilogue import Gate, Scatter
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find
from warploom.runtime import kernel as kernels

TRIES = 20


@dataclass(frozen=True)
class Mutant:
    """A kernel, what is taken out of its text, and a shape that makes the lack of it show; what
    comes in its place, if anything.

    The shape must not make the kernel hang: where consumers may run ahead of the producer, there is
    one tile a block with one k tile.
    """

    kernel: KernelSpec
    without: str  # a pattern
    shape: tuple[int, int, int]
    instead: str = ""

    def sources(self) -> tuple[str, str]:
        """The text of the kernel, and without this, or with something else instead."""
        whole = render(self.kernel)
        wrong, count = re.subn(self.without, self.instead, whole)
        if count == 0:
            raise LookupError(f"{self.without} is not in the text of {self.kernel.name}")
        return whole, wrong


# Storing more than reading: TMA falls behind, and still reads a buffer when its turn comes again.
STORING = cases.spec((128, 128), d="fp32")

SCALED = cases.spec((128, 128), a="e4m3", scales=("row_block", "fp32", "fp32"))
GATED = cases.spec(
    (128, 128), a="e4m3", scales=("row_block", "fp32", "fp32"), epilogue=(Gate("silu"),)
)
GATED_SWAPPED = cases.spec(
    (64, 64),
    a="e4m3",
    scales=("row_block", "fp32", "fp32"),
    epilogue=(Gate("silu"),),
    swap_ab=True,
    consumers=1,
)
AHEAD = cases.spec((64, 64), a="e4m3", consumers=1, scales=("row_block", "fp32", "fp32"))
SWAPPED = cases.spec(
    (64, 64), a="e4m3", swap_ab=True, consumers=1, scales=("row_row", "fp32", "e8m0")
)
SCATTERED = cases.spec((128, 128), epilogue=(Scatter("int32"),), kernel_schedule="pingpong")

MUTANTS = {
    "consumers do not wait for the products' operands": Mutant(
        cases.spec((128, 128)),
        r"shared\.full\[[^]]*\]\.wait\([^)]*\);",
        (1021, 1016, 61),
    ),
    "nobody waits until TMA has read a staging buffer": Mutant(
        STORING, r"if \(thread == 0\) cute::tma_store_wait<1>\(\);", (8191, 8184, 61)
    ),
    "only one thread waits until TMA has read a staging buffer": Mutant(
        STORING,
        r"cutlass::arch::NamedBarrier::sync\(128, barrier\);(?=\s+stage\()",
        (8191, 8184, 61),
    ),
    "a block adds up sums that others have not laid down": Mutant(
        cases.spec((64, 64), consumers=1, cluster_split_k=4),
        r"SplitSums::meet\(\);  // all[^\n]*|\bmeet\(\);(?=\s+CUTE_UNROLL)",
        (64, 512, 4093),
    ),
    "a cluster adds up parts that others have not left": Mutant(
        cases.spec((128, 128), stream_k=True),
        r'do asm volatile\("ld\.acquire.*\n\s*while \(up == 0\);',
        (125, 128, 60_000),
    ),
    # Blocks past the end of m store nothing and run ahead, with their slices of B.
    "a producer waits for those only that share its A": Mutant(
        cases.spec((64, 128), d="fp32", cluster=(2, 2), consumers=1, store="direct", stages=4),
        r" \+ kClusterN - 1(?=\)\);)| \|\| block / kClusterM == rank / kClusterM",
        (61, 38_400, 1024),
    ),
    "parts of k are added up before they have been left": Mutant(
        cases.spec((64, 64), consumers=1, split_k=16),
        r"wait_for_previous_grid\(\);[^\n]*\n(?=  Store store)",
        (64, 512, 60_000),
    ),
    "a row has the block scale of its neighbour": Mutant(
        SCALED,
        r"scales\.rows\[row \+",
        (257, 264, 520),
        "scales.rows[(row ^ 1) +",
    ),
    "rows of a fragment have each other's block scales": Mutant(
        SCALED, r"kWgmmaM \+ i % 2 \* 8\]", (257, 264, 520), "kWgmmaM + 8 - i % 2 * 8]"
    ),
    "columns have the scale of the next 128x128": Mutant(
        SCALED,
        r"min\(at\.n, p\.n - 1\) / 128",
        (257, 264, 520),
        "(min(at.n, p.n - 1) / 128 + 1) % 3",
    ),
    "up has the block scales of the gate": Mutant(
        GATED,
        r"next_columns\[j\]",
        (257, 384, 520),
        "next_columns[0]",
    ),
    "the block scales of up begin with a block": Mutant(
        GATED,
        r"\(p\.n / 2 \+ min\(n, p\.n - 1\) / 2\) / 128",
        (257, 384, 520),
        "(p.n / 2 + 127) / 128 + min(n, p.n - 1) / 2 / 128",
    ),
    "swapped, up has the block scales of the gate": Mutant(
        GATED_SWAPPED,
        r"\(up - start\)",
        (61, 384, 520),
        "(block - start)",
    ),
    "the last k tile has the scales of A of the one before": Mutant(
        SCALED,
        r"k \* p\.a_scales_k",
        (257, 264, 520),
        "(k - (k + 1 == k_tiles)) * p.a_scales_k",
    ),
    "the last k tile has the scales of B of the one before": Mutant(
        SCALED,
        r"--left > 0",
        (257, 264, 520),
        "--left > 1",
    ),
    "the last k tile has the scales of A of the one before, by TMA": Mutant(
        SCALED,
        r"k_tile \* p\.a_scales_k",
        (256, 264, 520),
        "(k_tile - (k_tile + 1 == k_tiles)) * p.a_scales_k",
    ),
    "rows have the block scales of the next four, by TMA": Mutant(
        SCALED, r"p\.a_scales \+ at\.m \+", (256, 264, 520), "p.a_scales + (at.m + 4) % p.m +"
    ),
    "a k tile has the block scales of the next one": Mutant(
        AHEAD, r"shared\.scales\[previous\]", (257, 264, 1160), "shared.scales[position.stage]"
    ),
    "a k tile has the products of the one before": Mutant(
        AHEAD,
        r"if constexpr \(kIssues\) issue<1 - kBank>",
        (257, 264, 1160),
        "if constexpr (kIssues) issue<kBank>",
    ),
    "a swapped column has the block scale of its neighbour": Mutant(
        SWAPPED, r"lane % 4 \* 2 \+ i % 2\]", (61, 264, 520), "lane % 4 * 2 + 1 - i % 2]"
    ),
    "a gate multiplies itself": Mutant(
        wider.GATED[0],
        r"Factor::function\(of_product\[1\]",
        (257, 272, 193),
        "Factor::function(of_product[0]",
    ),
    "up has the bias of the gate": Mutant(
        wider.GATED[0], r"at\.column\[0\] \+ factor \* \(n / 2\)", (257, 272, 193), "at.column[0]"
    ),
    "warps of a swapped gate leave gaps between their columns": Mutant(
        wider.GATED[24], r"% 4 \* 8 \+ lane / 4", (5, 272, 193), "% 4 * 16 + lane / 4"
    ),
    "rows of up are loaded from eight further on": Mutant(
        wider.GATED[0],
        r"k, 0, 0, \(n \+ first\) / 16",
        (257, 272, 193),
        "k, 0, 0, (n + first) / 16 + 1",
    ),
    "up has the gradient of the gate": Mutant(
        wider.UNGATED[0], r"up, 2 \* n, of_up\)", (257, 272, 193), "up, 2 * n, of_gate)"
    ),
    "the gradient of a gate lacks its derivative": Mutant(
        wider.UNGATED[0], r" \* Derivative::slope\(gate\)", (257, 272, 193)
    ),
    "d is the gradient that the gate's result has": Mutant(
        wider.UNGATED[0], r"x\[i\]\[j\] = value \* factor;", (257, 272, 193)
    ),
    "the gradients of gate and up change places": Mutant(
        wider.UNGATED[2],
        r"gradients\[2\] = \{(.*),\s+(.*)\};",
        (257, 272, 193),
        r"gradients[2] = {\2, \1};",
    ),
    "a lane knows only its own columns of a block": Mutant(
        wider.QUANTIZED[0],
        r"most = fmaxf\(most, __shfl_xor_sync\(~0u, most, 2\)\);",
        (257, 272, 193),
    ),
    "a scale is of the row eight further on": Mutant(
        wider.QUANTIZED[0], r"inverse\.row\[i / 2\]", (257, 272, 193), "inverse.row[1 - i / 2]"
    ),
    "a lane adds its own squares to those of one neighbour alone": Mutant(
        wider.NORMS[0],
        r"total \+= __shfl_xor_sync\(~0u, total, lanes\);",
        (257, 272, 193),
        ";",
    ),
    "rows have each other's mean of squares": Mutant(
        wider.NORMS[0],
        r"total = second \? sum\[1\] : sum\[0\]",
        (257, 272, 193),
        "total = second ? sum[0] : sum[1]",
    ),
    "the second half of a group's columns is not squared": Mutant(
        wider.NORMS[0], r"f < first \+ kEach", (257, 272, 193), "f < first + 1"
    ),
    "a swapped warp squares half of its columns": Mutant(
        wider.NORMS[9],
        r"i < 4; \+\+i\) \{(?=\s+const float value)",
        (61, 264, 193),
        "i < 4; i += 2) {",
    ),
    "a mean of squares has a share too few": Mutant(
        wider.NORMS[15], r"\(k - 1\) / kColumns \+ 1", (257, 272, 193), "k / kColumns"
    ),
    "a norm has no eps": Mutant(wider.NORMS[15], r"sum\[j\] \+ eps", (257, 272, 193), "sum[j]"),
    "rows of a fragment have one factor": Mutant(
        wider.NORMS[15], r"at\.row\[1\] - first\]", (257, 272, 193), "at.row[0] - first]"
    ),
    "rows of a tile have the factors of the tile before": Mutant(
        wider.NORMS[15],
        r"if \(row == first\) return;",
        (33_000, 272, 193),  # several tiles a consumer
        "if (first >= 0) { first = row; return; }",
    ),
    "both values of a pair are rounded by one number": Mutant(
        wider.ROUNDED[0], r"i % 2 \? word\[i / 2\] >> \(32 - kDropped\) : ", (257, 272, 193)
    ),
    "rows of a patch are rounded by one word": Mutant(
        wider.ROUNDED[0], r"right \? four\.w : four\.y", (257, 272, 193), "right ? four.z : four.x"
    ),
    "a swapped row is rounded by the words of its neighbour": Mutant(
        wider.ROUNDED[11], r"words\(place\.row\[i\]", (61, 272, 193), "words(place.row[1 - i]"
    ),
    "a row is written where its neighbour belongs": Mutant(
        SCATTERED,
        r"scatter\(row \+ i \* kApart\)",
        (257, 264, 193),
        "scatter(row + i * kApart > 0 ? row + i * kApart - 1 : 1)",
    ),
    "rows are written from a buffer that others have not filled": Mutant(
        SCATTERED,
        r'asm volatile\("bar\.sync %0, 128;"[^;]*;',
        (8191, 8184, 61),
    ),
    "a row goes where it would without indices, element by element": Mutant(
        cases.spec((64, 64), epilogue=(Scatter("int64"),), consumers=1, store="direct"),
        r"to = scatter\(place\.row\[i\]\)",
        (257, 263, 193),
        "to = place.row[i]",
    ),
    "a flag stays raised": Mutant(
        cases.spec((128, 128), stream_k=True),
        r"\*flag\(other\) = 0;[^\n]*",
        (125, 128, 60_000),
    ),
}


def judge(mutant: Mutant, check: Callable[[int], object], tries: int = 3) -> NoReturn:
    """Check the mutant, in the place of its kernel, on data of several seeds until it is wrong;
    exit with 0 if it was.
    """
    spec = mutant.kernel
    artifact = nvrtc.compile(mutant.sources()[1], name=spec.name, arch=spec.arch, toolchain=find())
    kernels._kernels[spec] = kernels.Kernel(spec, artifact)
    for seed in range(tries):
        try:
            check(seed)
        except torch.OutOfMemoryError:  # which says nothing about the mutant
            raise
        except (AssertionError, DeviceError, RuntimeError) as error:
            how = "caught" if isinstance(error, AssertionError) else "failed"
            print(f"{how} in run {seed + 1}")
            sys.exit(0)
    print("survived")
    sys.exit(1)


def check(mutant: Mutant, seed: int) -> None:
    """Assert that a call of its kernel is right."""
    if mutant.kernel in wider.ROUNDED:  # either neighbour is within the bound
        assert_rounded_as_the_reference(mutant.kernel, *mutant.shape, seed=seed)
    else:
        arena.verify(arena.call(mutant.kernel, *mutant.shape, seed=seed))


if __name__ == "__main__":
    chosen = MUTANTS[sys.argv[1]]
    judge(chosen, partial(check, chosen), TRIES)

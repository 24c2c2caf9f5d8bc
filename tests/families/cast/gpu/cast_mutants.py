"""Kernels that are wrong in one place each, and what becomes of them.

What a mutant does not wait for may have come by then, and its results be right by luck. So a kernel
is made to pause where the fault lies: with the pause, and without the fault, it must be right.
"""

from __future__ import annotations

from dataclasses import dataclass

import cast_cases as cases

from warploom.generator import nvrtc
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find
from warploom.runtime import kernel as kernels
from warploom.runtime import plan

Edit = tuple[str, str]  # a text that is in the kernel, and what comes in its place
BLOCKS = cases.spec("1x128", transpose=True)
SQUARES = cases.spec("128x128", transpose=True)
TENSOR = cases.spec("tensor")
LONG_ROWS = cases.spec("row", cases.CastSchedule(256, 2, "cta"))
STOCHASTIC = cases.spec("1x128", transpose=True, rounding="stochastic")


@dataclass(frozen=True)
class Mutant:
    """What is wrong with a kernel, where it pauses, and extents that make that show."""

    wrong: Edit
    kernel: KernelSpec
    m: int = 300
    n: int = 520
    pauses: tuple[Edit, ...] = ()

    def sources(self) -> tuple[str, str]:
        """The text of the kernel that pauses, and of the one that is wrong too."""
        whole = render(self.kernel)
        for edit in self.pauses:
            whole = _edited(whole, edit)
        return whole, _edited(whole, self.wrong)


def _edited(text: str, edit: Edit) -> str:
    old, new = edit
    if text.count(old) != 1:
        raise LookupError(f"{text.count(old)} times in the text of the kernel: {old}")
    return text.replace(old, new)


PAUSE = "for (const auto since = clock64(); clock64() - since < 30000;) {}\n"
WAIT = '  asm volatile("cp.async.commit_group;\\ncp.async.wait_all;" ::: "memory");\n'
PEAKS = "  *reinterpret_cast<float2*>(&shared.peaks[part][column])"
SHUT = "make_float2(peaks[0], peaks[1]);\n  __syncthreads();\n"
QUANTIZED = "  quantize_transposed(p, shared, random, row0, column0);\n  __syncthreads();\n"
READ = "  __syncthreads();  // x of the tile is read: the transpose lies where it was\n"
TURNED = "  transpose(shared.q, q_t);\n  __syncthreads();\n"
VALUES = "  float factors[2];\n"
SHARED = "  value = shared[threadIdx.x % kWarps];\n"

MUTANTS = {
    "the scale is the one of the row beside": Mutant(
        wrong=("p.scale[(row0 + row) * p.scale_down", "p.scale[(row0 + (row ^ 1)) * p.scale_down"),
        kernel=BLOCKS,
        m=256,
    ),
    "a row is the one 8 rows on": Mutant(
        wrong=("read(shared, vector, row, lane)", "read(shared, vector, (row + 8) % kTile, lane)"),
        kernel=BLOCKS,
    ),
    "columns have the largest magnitude of some of their rows": Mutant(
        wrong=(SHUT, SHUT.partition("\n")[0] + "\n"),
        kernel=BLOCKS,
        pauses=((PEAKS, "  if (part > 0) " + PAUSE + PEAKS),),
    ),
    "the transpose is stored before all threads have written theirs": Mutant(
        wrong=(QUANTIZED, QUANTIZED.partition("\n")[0] + "\n"),
        kernel=BLOCKS,
        pauses=((VALUES, "  if (part > 0) " + PAUSE + VALUES),),
    ),
    "the transpose overwrites x that is still read": Mutant(
        wrong=(READ, ""),
        kernel=SQUARES,
        pauses=(
            (
                "    random.draw(row0 + row, column, 0);\n",
                "    random.draw(row0 + row, column, 0);\n    if (threadIdx.x >= 32) " + PAUSE,
            ),
        ),
    ),
    "the transpose of squares is stored before all threads have written theirs": Mutant(
        wrong=(TURNED, TURNED.partition("\n")[0] + "\n"),
        kernel=SQUARES,
        pauses=((TURNED, "  if (threadIdx.x >= 32) " + PAUSE + TURNED),),
    ),
    "the last part of a tensor has no largest magnitude": Mutant(
        wrong=(
            "piece < pieces ? p.n - column : 0, is_aligned",
            "piece + 1 < pieces ? p.n - column : 0, is_aligned",
        ),
        kernel=TENSOR,
    ),
    "a row has the largest magnitude of some of its warps": Mutant(
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
    "the second vector of a row is the first": Mutant(
        wrong=("use(vectors[i], first + i * kStep)", "use(vectors[0], first + i * kStep)"),
        kernel=LONG_ROWS,
        n=8200,
    ),
    "random numbers come twice": Mutant(
        wrong=("(column / 8 + i) ^ state.y", "(column / 8) ^ state.y"), kernel=STOCHASTIC
    ),
}


def outcome(mutant: Mutant) -> str:
    """`caught`, `survived`, or what is wrong without the fault too."""
    whole, wrong = mutant.sources()
    try:
        _verify(mutant, whole, seed=1)
    except AssertionError as error:
        return f"the kernel is wrong without the fault, too: {error}"
    try:
        _verify(mutant, wrong, seed=2)
    except AssertionError:
        return "caught"
    return "survived"


def _verify(mutant: Mutant, source: str, seed: int) -> None:
    """Verify a call with the kernel of `source` in the place of the mutant's."""
    spec = mutant.kernel
    artifact = nvrtc.compile(source, name=spec.name, arch=spec.arch, toolchain=find())
    before = kernels._kernels.pop(spec, None)
    plan.forget()  # plans hold the kernel that was there before
    kernels._kernels[spec] = kernels.Kernel(spec, artifact)
    try:
        cases.made(spec, mutant.m, mutant.n, seed=seed).verify()
    finally:
        del kernels._kernels[spec]
        if before is not None:
            kernels._kernels[spec] = before
        plan.forget()

"""Runs kernels that are wrong in one place each; mutants.py says how and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mixed_arena as arena
import mixed_cases as cases
import mutants
from mutants import PAUSE, Clock, Edit

from warploom.generator.epilogue import Gate, RmsScale
from warploom.generator.specification import KernelSpec

MMA = cases.spec((16, 128, 128), "mma", "sums", of=cases.operation(group=32), stages=2)
WGMMA = cases.spec((32, 128, 128), "wgmma", "sums", of=cases.operation(group=32), stages=2)
ZEROS = cases.spec((16, 128, 128), "mma", "sums", of=cases.operation(b="uint4", group=32), stages=2)
AHEAD = cases.spec(
    (32, 128, 128), "wgmma", "sums", of=cases.operation(a="e4m3", group=32), stages=2, lookahead=2
)
TERNARY = cases.spec(
    (16, 128, 256), "wgmma", "sums", of=cases.operation(a="int8", b="ternary"), stages=2
)
TWO_STEPS = cases.spec(
    (16, 128, 128), "mma", "sums", of=cases.operation(b="int2", group=32), stages=2
)
NVFP4 = cases.spec(
    (16, 128, 128),
    "mma",
    "weights",
    of=cases.operation(b="nvfp4", group=16, scale="e4m3"),
    stages=2,
)
SHARED = cases.spec((16, 64, 256), "mma", "sums", warp_split_k=2)
SPLIT = cases.spec((16, 64, 128), "mma", "sums", consumers=1, cluster_split_k=4)
STREAMED = cases.spec((16, 128, 128), "mma", "sums", stream_k=True)
NORMED = cases.spec((16, 128, 128), "mma", "sums", of=cases.operation(epilogue=(RmsScale(),)))
GATED_NORM = (RmsScale(), Gate("silu", "interleaved"))
NORMED_GATE = cases.spec((16, 128, 128), "mma", "sums", of=cases.operation(epilogue=GATED_NORM))
CHAINED = cases.spec((16, 128, 128), "mma", "sums", ctas_per_sm=2)

# A tile a block, and as many k tiles as stages: whoever does not wait gets no lap ahead.
ONE_LAP = (16, 1000, 256)
LONG = (16, 1000, 2048)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """A product of a packed weight. `chained`: of which the next reads the result."""

    wrong: tuple[Edit, ...]
    shape: Any
    pauses: tuple[Edit, ...] = ()
    kernel: KernelSpec = MMA
    chained: bool = False

    def verify(self, seed: int, clock: Clock) -> None:
        """Assert that a call, or a chain of them, is right, with a clock on its kernels."""
        if self.chained:
            chain = arena.chain(self.kernel, *self.shape, seed=seed)
            chain.run()  # planned and loaded by now
            with clock():
                chain.run()
            chain.assert_right()
            return
        made = arena.call(self.kernel, *self.shape, seed=seed)
        with clock():
            made.run()
        arena.assert_right(made)
        assert made.d.untouched_outside()


LOAD = "    full.arrive_and_expect_tx(Slab::kStageBytes);\n"
SLOW_LOADS = ((LOAD, PAUSE + LOAD),)
AWAIT = "shared.full[position.stage].wait(position.phase);\n"
MULTIPLY = "      CUTE_UNROLL\n      for (int own = 0; own < Slab::kOfStage / kShares; ++own) {\n"
SLOW_PRODUCTS = ((MULTIPLY, PAUSE + MULTIPLY),)
RELEASE = "      release(shared.empty[position.stage]);\n"
RELEASE_READ = RELEASE.replace("release", "release_read")
ADVANCE, PROMOTE = "      position.advance();\n", "      promote(accumulators, banks[1 - kBanks"
CONSUME = "  wait_for_previous_grid();\n  const Tiles tiles(p);\n"
LOAD_A = "  Position position{0, 1};\n  CUTE_NO_UNROLL\n"
WAIT = "  wait_for_previous_grid();\n"
MEET = "    cutlass::arch::NamedBarrier::sync(kShares * 128, 1 + rows);\n"
READ = MEET.replace("\n", "  // all have read the partial sums of the tile before\n")
BEGUN = "    cute::cluster_wait();  // all CTAs of the cluster have started\n"
EXCHANGED = "    shared.exchanged.wait(0);  // a cluster has one tile\n"
ADDED = "      for (int j = 0; j < 4; ++j) sum[j] = total[j];\n    }\n"
SUMMED = "      CUTE_UNROLL\n      for (int j = 0; j < kAtOnce; ++j) {\n        CUTE_UNROLL\n"
MEETING = (
    "    cutlass::arch::NamedBarrier::sync(kThreads, barrier);  // all have read the factors of "
    "the tile before\n"
)
PREPARED = "    }\n    cutlass::arch::NamedBarrier::sync(kThreads, barrier);\n  }\n"
LOAD_OPERANDS = (
    "    CUTE_UNROLL\n    for (int f = 0; f < kFragments; ++f) operands[f] = epilogue.load("
)
LEAVE = (
    "  __device__ __forceinline__ void leave("
    "const Accumulators& accumulators, int cluster) const {\n"
)
RAISED = (
    '      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(up) : "l"(flag(other)) '
    ': "memory");\n      while (up == 0);\n'
)

MUTANTS = {
    # The last stage is waited for, so that no block ends before its loads.
    "a stage is multiplied before it is there": Mutant(
        wrong=(("      " + AWAIT, "      if (i > 0) " + AWAIT),), shape=ONE_LAP, pauses=SLOW_LOADS
    ),
    "a stage is multiplied before it is there, by wgmma": Mutant(
        wrong=(("      " + AWAIT, "      if (i > 0) " + AWAIT),),
        shape=ONE_LAP,
        pauses=SLOW_LOADS,
        kernel=WGMMA,
    ),
    "a stage is given back before it was read": Mutant(
        wrong=(
            (RELEASE_READ + ADVANCE, ADVANCE),
            (PAUSE + MULTIPLY, RELEASE_READ + PAUSE + MULTIPLY),
        ),
        shape=LONG,
        pauses=SLOW_PRODUCTS,
    ),
    "a stage is given back before it was read, by wgmma": Mutant(
        wrong=(
            (RELEASE + PROMOTE, PROMOTE),
            (PAUSE + MULTIPLY, RELEASE + PAUSE + MULTIPLY),
        ),
        shape=LONG,
        pauses=SLOW_PRODUCTS,
        kernel=WGMMA,
    ),
    "A is loaded before the launch before is done": Mutant(
        wrong=((WAIT + LOAD_A, LOAD_A),),
        shape=(16, 512, 512),
        pauses=((CONSUME, CONSUME + PAUSE),),
        kernel=CHAINED,
        chained=True,
    ),
    "scales are those of the next group": Mutant(
        wrong=(("(slab, step / kGroupSteps)", "(slab, (step / kGroupSteps + 1) % 4)"),),
        shape=LONG,
    ),
    "scales are those of the next group, by wgmma": Mutant(
        wrong=(("issue / kEach);", "(issue / kEach + 1) % 4);"),), shape=LONG, kernel=WGMMA
    ),
    "scales are those of the row 8 further": Mutant(
        wrong=(("(i % 4 < 2 ? low : high)", "(i % 4 < 2 ? high : low)"),), shape=LONG
    ),
    "two banks of sums are swapped": Mutant(
        wrong=(
            (
                "promote(accumulators, banks[1 - bank % 2], pending)",
                "promote(accumulators, banks[bank % 2], pending)",
            ),
        ),
        shape=LONG,
        kernel=WGMMA,
    ),
    "scales are those of the next group, decoded ahead": Mutant(
        wrong=(("read(slab, i % kOfSlab);", "read(slab, (i + 1) % kOfSlab);"),),
        shape=LONG,
        kernel=AHEAD,
    ),
    "what is decoded ahead is never multiplied": Mutant(
        wrong=(("weights[i % 2][block][j]", "weights[0][block][j]"),), shape=LONG, kernel=AHEAD
    ),
    "codes of 2 bits are those of the row 8 further": Mutant(
        wrong=(("(words[0] << (6 - 2 * i))", "(words[0] << (6 - 2 * (i ^ 1)))"),),
        shape=LONG,
        kernel=TERNARY,
    ),
    "the second of two steps has the codes of the first": Mutant(
        wrong=(("second ? words[0] >> 8 : words[0]", "words[0]"),), shape=LONG, kernel=TWO_STEPS
    ),
    "scales of 16 of k are those of the next": Mutant(
        wrong=(("(slab, step / kGroupSteps)", "(slab, (step / kGroupSteps + 1) % 8)"),),
        shape=LONG,
        kernel=NVFP4,
    ),
    "scales of rows are those of the row 8 before": Mutant(
        wrong=(("high = p.channel_scales[row + 8]", "high = p.channel_scales[row]"),),
        shape=LONG,
        kernel=NVFP4,
    ),
    "zero points are those of other rows": Mutant(
        wrong=(
            (
                "Slab::kZeros + place)",
                "Slab::kZeros + (place ^ 2))",
            ),
        ),
        shape=LONG,
        kernel=ZEROS,
    ),
    "consumers store the same columns": Mutant(
        wrong=(("    at.n += rows * kBlocks * kWgmmaM;\n", ""),), shape=LONG
    ),
    "who shares k adds what the other has not left": Mutant(
        wrong=((MEET, ""),),
        shape=LONG,
        pauses=((READ, READ + "    if (share == 1)\n" + PAUSE),),
        kernel=SHARED,
    ),
    # Several tiles a block: the second's sums come while the first's are added.
    "who shares k leaves what the other has no room for yet": Mutant(
        wrong=((READ, ""),),
        shape=(16, 64 * 800, 256),
        pauses=((MEET, MEET + "    if (share == 0)\n" + PAUSE),),
        kernel=SHARED,
    ),
    # Waited for later, so that no block ends before others write to it.
    "a block of a cluster adds what others have not left": Mutant(
        wrong=((EXCHANGED, ""), (ADDED, ADDED + EXCHANGED)),
        shape=LONG,
        pauses=((BEGUN, BEGUN + "    if (rank > 0)\n" + PAUSE),),
        kernel=SPLIT,
    ),
    "parts of a tile are added that nobody has left": Mutant(
        wrong=((RAISED, ""),), shape=LONG, pauses=((LEAVE, LEAVE + PAUSE),), kernel=STREAMED
    ),
    "rows are scaled before their factors are there": Mutant(
        wrong=((PREPARED, "    }\n  }\n"),),
        shape=ONE_LAP,
        pauses=((SUMMED, "      if (warp % 4 == 1)\n" + PAUSE + SUMMED),),
        kernel=NORMED,
    ),
    # Several tiles a block, of other rows.
    "factors are overwritten while others scale by them": Mutant(
        wrong=((MEETING, ""),),
        shape=(600, 1000, 256),
        pauses=((LOAD_OPERANDS, "    if (threadIdx.x / 32 % 4 == 1)\n" + PAUSE + LOAD_OPERANDS),),
        kernel=NORMED,
    ),
    "a row of gate and up has the factor of the row beside": Mutant(
        wrong=(("factors[at.row[0] - first]", "factors[(at.row[0] - first) ^ 1]"),),
        shape=(16, 1008, 256),
        kernel=NORMED_GATE,
    ),
    "gate and up have the factors of two rows": Mutant(
        wrong=(("*= operand.row[i / 2];", "*= operand.row[i % 2];"),),
        shape=(16, 1008, 256),
        kernel=NORMED_GATE,
    ),
    "gates are scaled before their factors are there": Mutant(
        wrong=((PREPARED, "    }\n  }\n"),),
        shape=(16, 1008, 256),
        pauses=((SUMMED, "      if (warp % 4 == 1)\n" + PAUSE + SUMMED),),
        kernel=NORMED_GATE,
    ),
    # Blocks end before their loads, which may end the process: so it comes last.
    "the parity of the first lap is that of the second": Mutant(
        wrong=(("  Position position{0, 0};\n", "  Position position{0, 1};\n"),),
        shape=ONE_LAP,
        pauses=SLOW_LOADS,
    ),
}


if __name__ == "__main__":
    mutants.main(MUTANTS)

"""Runs backward kernels that are wrong in one place each; mutants.py says how and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import attention_backward_arena as arena
import attention_block_cases as blocks
import attention_mutants
import mutants
import torch
from attention_backward_cases import SIMPLE, SIMPLE_UNLIKE, chosen
from attention_cases import Shape
from attention_mutants import BIAS
from mutants import PAUSE, Clock

from warploom.generator.specification import KernelSpec

LONG = Shape(2, 6, 2, 1031, 1031)
KEYS_SHAPE = Shape(3, 6, 2, 300, 777)
# Fewer q tiles than multiprocessors: the next kernel's blocks start beside those of the preprocess.
ONE_WAVE = Shape(1, 61, 61, 127, 349)
# One step: who does not wait for the peer there would be two ahead of it in the next but one, which
# the peer's barriers cannot tell from none, and both would wait for ever.
ONE_STEP = Shape(1, 61, 61, 63, 349)
RUNS = 10


@dataclass(frozen=True)
class Mutant(attention_mutants.Mutant):
    """A backward kernel. `repeats`: that gradients are the same every time is verified, too."""

    kernel: KernelSpec = SIMPLE["long"]
    repeats: bool = False
    keywords: dict[str, Any] = field(default_factory=lambda: {"causal": "top_left"})

    def verify(self, seed: int, clock: Clock) -> None:
        """Assert that a pass is right, and all that repeat it bit-equal, with a clock on each."""
        made = arena.make(self.kernel, self.shape, seed=seed, **self.given)
        first = arena.clones(arena.verify(made, clock=clock()))
        for _ in range(RUNS * self.repeats):
            with clock():
                found = made.run()
            assert all(map(torch.equal, found, first))


AWAIT_DO = "    c.shared.do_full[at.stage].wait(at.phase);\n"
DP = "    held.multiply(c, dp, c.staged_do(at));\n"
LOAD_DO = "      do_full.arrive_and_expect_tx(kQBytes);\n"
WRITE = "    write(c, c.own_ds(step), ds);\n"
DK = "    multiply_gradient(dk, ds, c.staged_q(at) + c.columns<kQTile>(c.part));\n"
RELEASE_Q = "    release(c.shared.q_empty[at.stage]);\n"
MEET = "    meet();\n"
WAIT_SEMAPHORE = "      wait_semaphore(p.turns + sum_index, tiles_before(p, work, m * kQTile));\n"
AWAIT_SUMS = "      shared.sums_full[writer].wait(phase);\n"
BEFORE_WAIT = "and touches no global memory.\n"  # in the main kernel alone
WAIT = '  asm volatile("griddepcontrol.wait;\\ngriddepcontrol.launch_dependents;" ::: "memory");\n'
SYNC_SUMS = "  sync_cluster();  // the CTAs' fragments are there\n"
LAY_DV = "  lay(of_dv, dv, warp);\n"
AWAIT_PEER = "  c.shared.peer_full.wait(step.parity);\n"
EXCHANGE = "    exchange(c, step);\n"
MULTIPLY_PEER = "    multiply_peer_query(c, dq, step);\n"
LATE_PEER = "    if (c.part == 1)\n" + PAUSE + MULTIPLY_PEER
RELEASE_PEER = "    release_ds(c);\n"
# Only one of the two lets go early. If both did, one would be two steps ahead (see ONE_STEP).
RELEASE_FIRST = "    if (c.part == 0) release_ds(c);\n"
RELEASE_SECOND = "    if (c.part == 1) release_ds(c);\n"
AWAIT_STAGE = "      shared.q_empty[position.stage].wait(position.phase);\n"
WRITE_MASK = "      shared.mask[position.stage] = listed.y;  // released with what comes next\n"
READ_MASK = "    step.mask = shared.mask[at.stage];\n"
# The preprocess goes on when main has begun, however late the host launches it: where 36 processes
# shared a GPU, a pause of some time was over by then. It ends after a second in any case.
MAIN = 'extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)\n'
STATISTICS = "  float* statistics = p.statistics + "  # in the preprocess alone
SUMS = "  const auto* sums = reinterpret_cast<const float4*>(p.dq_sum"  # in the postprocess alone
BEGUN = "  if (threadIdx.x == 0) *(volatile int*)&main_begun = 1;\n"
UNTIL_BEGUN = (
    "  for (const auto since = clock64(); *(volatile int*)&main_begun == 0 && "
    "clock64() - since < 2000000000;) {}\n"
)
HIDE = "if (score.hides(j, eight)) scores[j] = "
HEAD = "    const uint32_t head = work.sequence.batch * (p.heads) + work.head * p.sharing + i;\n"
AWAIT_WORDS = "      shared.words_empty[at.stage].wait(at.phase);\n"
READ_WORDS = "    shared.words_full[step.parity].wait(step.half_parity);\n"

MUTANTS = {
    "dq is multiplied before the other warpgroup has written its part of ds": Mutant(
        wrong=((MEET, ""),),
        shape=LONG,
        pauses=((WRITE, "    if (c.consumer == 1)\n" + PAUSE + WRITE),),
    ),
    "dp is multiplied before its do is there": Mutant(
        wrong=((AWAIT_DO + DP, DP + AWAIT_DO),),
        shape=LONG,
        pauses=((LOAD_DO, PAUSE + LOAD_DO),),
    ),
    "q is given back before dk is multiplied with it": Mutant(
        wrong=((RELEASE_Q, ""), (PAUSE + DK, RELEASE_Q + PAUSE + DK)),
        shape=LONG,
        pauses=((DK, PAUSE + DK),),
    ),
    "the main kernel does not wait for the preprocess": Mutant(
        wrong=((BEGUN + WAIT, BEGUN + WAIT.replace("griddepcontrol.wait;\\n", "")),),
        shape=ONE_WAVE,
        pauses=(
            (MAIN, "__device__ int main_begun;\n" + MAIN),
            (BEFORE_WAIT, BEFORE_WAIT + BEGUN),
            (STATISTICS, UNTIL_BEGUN + PAUSE + STATISTICS),
            (SUMS, "  main_begun = 0;\n" + SUMS),
        ),
    ),
    "a row attends to the column right of the diagonal": Mutant(
        wrong=(("begin = column - p.right - row;", "begin = column - p.right - 1 - row;"),),
        shape=Shape(2, 3, 3, 257, 257),
    ),
    "a cluster's blocks sum dk and dv that others have not laid down": Mutant(
        wrong=((SYNC_SUMS, ""),),
        shape=LONG,
        pauses=((LAY_DV, "  if (rank() == 1)\n" + PAUSE + LAY_DV),),
        kernel=SIMPLE["cluster"],
    ),
    "dq is multiplied before the peer's ds has arrived": Mutant(
        wrong=((AWAIT_PEER, ""),),
        shape=ONE_STEP,
        pauses=((EXCHANGE, "    if (c.part == 1)\n" + PAUSE + EXCHANGE),),
        kernel=SIMPLE["pair"],
    ),
    "the peer may overwrite its ds before dq is multiplied with it": Mutant(
        wrong=((RELEASE_SECOND, ""), (LATE_PEER, RELEASE_SECOND + LATE_PEER)),
        shape=LONG,
        pauses=((MULTIPLY_PEER, LATE_PEER), (RELEASE_PEER, RELEASE_FIRST + RELEASE_SECOND)),
        kernel=SIMPLE["pair"],
    ),
    "kv tiles do not wait for their turn": Mutant(
        wrong=((WAIT_SEMAPHORE, ""),),
        shape=LONG,
        pauses=((AWAIT_SUMS, AWAIT_SUMS + "      if (clock64() >> 6 & 1)\n" + PAUSE),),
        kernel=SIMPLE["deterministic"],
        repeats=True,
    ),
    "scores count that the forward pass's mask hides": Mutant(
        wrong=(("  if (step.mask >= 0) hide(c, scores, step.mask);\n", ""),),
        shape=LONG,
        kernel=blocks.BACKWARD[0],
        keywords={},
        mask="scores",
    ),
    "a tile's mask is written over before it was read": Mutant(
        wrong=((AWAIT_STAGE + WRITE_MASK, WRITE_MASK + AWAIT_STAGE),),
        shape=LONG,
        pauses=((READ_MASK, PAUSE + READ_MASK),),
        kernel=blocks.BACKWARD[0],
        keywords={},
        mask="scores",
    ),
    "scores of every other row count that the forward pass hides": Mutant(
        wrong=((HIDE, HIDE.replace("(j, eight)", "(j, eight) && j % 2")),),
        shape=LONG,
        kernel=chosen(128, further={"masked": True}),
        keywords={},
    ),
    "a tile counts as shown whose last key the mask hides": Mutant(
        wrong=(("keys.w < tile_end;", "keys.w < tile_end - 1;"),),
        shape=KEYS_SHAPE,
        kernel=chosen(128, further={"masked": True}),
        keywords={},
        keys="all but the last of a tile",
    ),
    "a tile of which a mask of keys shows one is left out": Mutant(
        wrong=(("|| end <= work.column)", "|| end <= work.column + 1)"),),
        shape=KEYS_SHAPE,
        kernel=chosen(128, further={"masked": True}),
        keywords={},
        keys="one of a tile",
    ),
    "a bias is read a column beside the forward pass's": Mutant(
        wrong=((BIAS, BIAS.replace("column", "column + 1")),),
        shape=LONG,
        kernel=chosen(128, further={"bias": "fp32", "bias_gradient": True}),
        keywords={},
    ),
    "other weights are dropped than in the forward pass": Mutant(
        wrong=((HEAD, HEAD.replace("+ i;", "+ i + 1;")),),
        shape=LONG,
        kernel=SIMPLE["dropout"],
        keywords={},
    ),
    "words are made anew before they were read": Mutant(
        wrong=((AWAIT_WORDS, ""),),
        shape=LONG,
        pauses=((READ_WORDS, PAUSE + READ_WORDS),),
        kernel=SIMPLE["dropout"],
        keywords={},
    ),
    "weights of another tile of the list are dropped": Mutant(
        wrong=(("const int m = list.entries[n].x;", "const int m = n;"),),
        shape=LONG,
        kernel=blocks.BACKWARD[-4],
        keywords={},
        mask="lists",
    ),
    "the gradient of a bias is not that of weights that are divided": Mutant(
        wrong=((" + log2f(p.keep)", ""),),
        shape=LONG,
        kernel=chosen(128, further={"bias": "bf16", "bias_gradient": True, "dropout": True}),
        keywords={},
    ),
}
UNLIKE = chosen(192, mask="causal", further={"dim_v": 128})
SERIAL_UNLIKE = SIMPLE_UNLIKE["serial"]
LOAD_UNLIKE_DO = "      do_full.arrive_and_expect_tx(kDoBytes);\n"
UNLIKE_DP = "    multiply_values(dp, c.v, c.staged_do(at) + c.row * kValueSpan / 16);\n"
MUTANTS |= {
    "dp is multiplied before its do of another dimension is there": Mutant(
        wrong=((AWAIT_DO + UNLIKE_DP, UNLIKE_DP + AWAIT_DO),),
        shape=LONG,
        pauses=((LOAD_UNLIKE_DO, PAUSE + LOAD_UNLIKE_DO),),
        kernel=SERIAL_UNLIKE,
    ),
    "dp lacks the last columns of v and do": Mutant(
        wrong=(("step < kDimV / ScoresWgmma::kK;", "step < kDimV / ScoresWgmma::kK - 1;"),),
        shape=LONG,
        kernel=UNLIKE,
    ),
    "every stage of do is read where the first is": Mutant(
        wrong=(("return d_o + at.stage * kDoBytes / 16;", "return d_o;"),),
        shape=LONG,
        kernel=UNLIKE,
    ),
    "a warpgroup has the columns of dv that the other has": Mutant(
        wrong=(("c.part * kValueColumns", "(1 - c.part) * kValueColumns"),),
        shape=LONG,
        kernel=UNLIKE,
    ),
    "delta lacks the last columns of out and do": Mutant(
        wrong=(("row < rows && column < p.dim_v)", "row < rows && column < p.dim_v - 8)"),),
        shape=LONG,
        kernel=UNLIKE,
    ),
}


if __name__ == "__main__":
    mutants.main(MUTANTS)

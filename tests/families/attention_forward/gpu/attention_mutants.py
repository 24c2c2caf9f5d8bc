"""Attention kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import attention_arena as arena
import attention_block_cases as blocks
import attention_cases as cases
import attention_key_cases as keys
import eight_bit_arena as eight
import mutants
from attention_cases import Shape
from mutants import PAUSE, Clock, Edit

from warploom.generator.specification import KernelSpec

# Two stages are few, and blocks are persistent.
PLAIN = cases.spec(128, 176, dim=128, pingpong=False, stages=2)
CAUSAL = cases.spec(128, 64, dim=64, mask="causal")

# Every block has one tile of rows, and as many kv tiles as stages: whoever does not wait cannot get
# a lap ahead of the producer, which would wait for it for ever.
ONE_LAP = Shape(1, 61, 61, 127, 349)
LONG = Shape(1, 61, 61, 127, 2777)
# 528 tiles of rows: at least three for each of 132 to 176 multiprocessors.
SEVERAL_TILES = Shape(4, 33, 11, 509, 349)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """Attention, its extents and its keywords."""

    wrong: tuple[Edit, ...]
    shape: Shape
    pauses: tuple[Edit, ...] = ()
    kernel: KernelSpec = PLAIN
    keywords: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None  # of blocks
    keys: str | None = None  # a mask of them

    @property
    def given(self) -> dict[str, Any]:
        """The keywords of its call."""
        listed = {} if self.mask is None else {"block_mask": blocks.MASKS[self.mask](self.shape)}
        shown = {} if self.keys is None else {"mask": keys.mask(self.keys, self.shape)}
        return self.keywords | listed | shown

    def verify(self, seed: int, clock: Clock) -> None:
        """Assert that a call of its kernel, with a clock on it, is right."""
        made = arena.call(self.kernel, self.shape, seed=seed, **self.given)
        arena.verify(made, clock=clock())


LOAD = "  full.arrive_and_expect_tx(kStageBytes);\n"
SLOW_LOADS = ((LOAD, PAUSE + LOAD),)
AWAIT_K = "    c.shared.k_full[c.position.stage].wait(c.position.phase);\n"
SCORES = "    multiply_scores(scores, c.q, c.staged_k());\n"
AWAIT_V = "    c.shared.v_full[before.stage].wait(before.phase);\n"
OUTPUT = "    multiply_output(output, weights, c.staged_v(before.stage));\n"
SCORES_THERE = (
    "    cute::warpgroup_wait<1>();  // the scores are there; the output's MMAs run on\n"
    "    fence(scores);\n"
)
RELEASE_K = "    c.release_operands(n);\n"
RELEASE_Q = "    if (n == begin) release_q();\n"
RELEASE_V = "    release(c.shared.v_empty[before.stage]);\n"
BIAS = "* p.bias_batch + head * p.bias_head + row * p.bias_row + column;\n"
AWAIT_WORDS = "    shared.words_full[at_words.stage].wait(at_words.phase);\n"
LOAD_VALUES = "  full.arrive_and_expect_tx(Values::kBytes);\n"
LOAD_K = """\
      if (n > work.begin)
        load(p.k_map, shared.k_full[position.stage], shared.k_empty[position.stage], position.phase,
             shared.k[position.stage], work.sequence, n - 1, head);
"""
LOAD_V_OF_8_BITS = (
    "      load_values(p, shared.v_full[before.stage], shared.v_empty[before.stage], before.phase, "
    "shared.v[before.stage],\n           work.sequence, n, head);\n"
)
PRODUCT = "    multiply_output(product, weights, c.staged_v(at.stage));\n"
AWAIT_V_OF_8_BITS = "    c.shared.v_full[at.stage].wait(at.phase);\n"
RELEASE_V_OF_8_BITS = "    release(c.shared.v_empty[at.stage]);\n"
MAKE_WORDS = "    const uint4 state = read(0);\n"

MUTANTS: dict[str, mutants.Mutant] = {
    "scores are multiplied before their k is there": Mutant(
        wrong=((AWAIT_K + SCORES, SCORES),),
        shape=ONE_LAP,
        pauses=SLOW_LOADS,
    ),
    # The last v is waited for, so that no block ends before its loads.
    "weights are multiplied before their v is there": Mutant(
        wrong=((AWAIT_V + OUTPUT + SCORES_THERE, OUTPUT + SCORES_THERE),),
        shape=ONE_LAP,
        pauses=SLOW_LOADS,
    ),
    "k is given back before it was read": Mutant(
        wrong=(
            (SCORES_THERE + RELEASE_K, SCORES_THERE),
            (PAUSE + SCORES, RELEASE_K + PAUSE + SCORES),
        ),
        shape=LONG,
        pauses=((SCORES, PAUSE + SCORES),),
    ),
    "v is given back before it was read": Mutant(
        wrong=((RELEASE_V, ""), (PAUSE + OUTPUT, RELEASE_V + PAUSE + OUTPUT)),
        shape=LONG,
        pauses=((OUTPUT + SCORES_THERE, PAUSE + OUTPUT + SCORES_THERE),),
    ),
    "q is given back before its last scores": Mutant(
        wrong=(
            (RELEASE_Q, ""),
            (PAUSE + SCORES, "    if (n == c.begin) c.release_q();\n" + PAUSE + SCORES),
        ),
        shape=SEVERAL_TILES,
        pauses=((SCORES, PAUSE + SCORES),),
    ),
    "the output is not rescaled when a maximum grows": Mutant(
        wrong=(("output[i] *= rows.rescale[i / 2 % 2];", "output[i] *= 1;"),),
        shape=LONG,
    ),
    "a row attends to the column right of the diagonal": Mutant(
        wrong=(("row + 8 * r + p.right + 1)", "row + 8 * r + p.right + 2)"),),
        shape=Shape(2, 3, 3, 257, 257),
        kernel=CAUSAL,
        keywords={"causal": "top_left"},
    ),
    "a tile's mask is read a column too far": Mutant(
        wrong=(("two.x >> c.column;", "two.x >> (c.column + 1);"),),
        shape=SEVERAL_TILES,
        kernel=blocks.FORWARD[0],
        mask="scores",
    ),
    "v is of another tile of the list than k": Mutant(
        wrong=(("      of_v = of_k;\n", ""),),
        shape=SEVERAL_TILES,
        kernel=blocks.FORWARD[0],
        mask="shared lists of 64",
    ),
    "a piece of work begins with the first k of the piece before": Mutant(
        wrong=(("position, next.first,", "position, now.first,"),),
        shape=SEVERAL_TILES,
        kernel=blocks.FORWARD[0],
        mask="lists",
    ),
    "a score is hidden by the mask of the column beside it": Mutant(
        wrong=(("score.hides(j, ", "score.hides(j ^ 1, "),),
        shape=SEVERAL_TILES,
        kernel=cases.chosen(128, further={"masked": True}),
    ),
    "a tile of which a mask of keys shows one is left out": Mutant(
        wrong=(("min(all_columns, keys.y)", "min(all_columns, keys.y - 1)"),),
        shape=SEVERAL_TILES,
        kernel=cases.chosen(128, further={"masked": True}),
        keys="one of a tile",
    ),
    "the first tile of which a mask shows keys is left out": Mutant(
        wrong=(
            (
                "{1, row, head, sequence, begin / kKvTile,",
                "{1, row, head, sequence, begin / kKvTile + 1,",
            ),
        ),
        shape=SEVERAL_TILES,
        kernel=cases.chosen(128, further={"masked": True}),
        keys="left",
    ),
    "a tile counts as shown whose last key the mask hides": Mutant(
        wrong=((": keys.w) / kKvTile;", ": keys.w + 1) / kKvTile;"),),
        shape=SEVERAL_TILES,
        kernel=cases.chosen(128, further={"masked": True}),
        keys="all but the last of a tile",
    ),
    "a mask with a hole counts as one without": Mutant(
        wrong=(("keys.count == keys.end - begin ? keys.end : begin", "keys.end"),),
        shape=SEVERAL_TILES,
        kernel=cases.chosen(128, further={"masked": True}),
        keys="one hidden",
    ),
    "a bias is read a column too far": Mutant(
        wrong=((BIAS, BIAS.replace("column", "column + 1")),),
        shape=SEVERAL_TILES,
        kernel=cases.chosen(128, further={"bias": "fp32"}),
    ),
    "words are read before they are made": Mutant(
        wrong=((AWAIT_WORDS, ""),),
        shape=ONE_LAP,
        pauses=((MAKE_WORDS, PAUSE + MAKE_WORDS),),
        kernel=cases.DROPOUT[0],
    ),
    "weights of another column are dropped": Mutant(
        wrong=(("n * kPatches + i % kPatches)", "n * kPatches + i % kPatches + 1)"),),
        shape=SEVERAL_TILES,
        kernel=cases.DROPOUT[0],
    ),
    "weights of another tile of the list are dropped": Mutant(
        wrong=(("tile * kPatches + i % kPatches)", "n * kPatches + i % kPatches)"),),
        shape=LONG,
        kernel=blocks.FORWARD[-3],
        mask="lists",
    ),
}
UNLIKE = cases.chosen(192, mask="causal", further={"dim_v": 128})
MUTANTS |= {
    "weights are multiplied before their v of another dimension is there": Mutant(
        wrong=((AWAIT_V + OUTPUT + "    c.order.arrive", OUTPUT + "    c.order.arrive"),),
        shape=ONE_LAP,
        pauses=((LOAD_VALUES, PAUSE + LOAD_VALUES),),
        kernel=cases.spec(128, 128, dim=192, further={"dim_v": 128}),
    ),
    "every stage of v is read where the first is": Mutant(
        wrong=(("return v + stage * (Values::kBytes / 16);", "return v;"),),
        shape=LONG,
        kernel=UNLIKE,
        keywords={"causal": "bottom_right"},
    ),
    "every box of v has its first columns": Mutant(
        wrong=((" i * kColumns, sequence.columns_at", " 0 * kColumns, sequence.columns_at"),),
        shape=SEVERAL_TILES,
        kernel=UNLIKE,
        keywords={"causal": "top_left"},
    ),
    "half of the output is not stored": Mutant(
        wrong=(("column < kDimV; column += 32", "column < kDimV / 2; column += 32"),),
        shape=SEVERAL_TILES,
        kernel=UNLIKE,
        keywords={"causal": "top_left"},
    ),
}
MUTANTS_OF_8_BITS = {
    # Loaded behind v, which is waited for too, k comes last.
    "scores of 8 bits are multiplied before their k is there": eight.Mutant(
        wrong=((AWAIT_K + PRODUCT, PRODUCT),),
        shape=ONE_LAP,
        pauses=((LOAD_K + LOAD_V_OF_8_BITS, LOAD_V_OF_8_BITS + PAUSE + LOAD_K),),
    ),
    "weights of e4m3 are multiplied before their v is there": eight.Mutant(
        wrong=((AWAIT_V_OF_8_BITS + "    c.shared.k_full", "    c.shared.k_full"),),
        shape=ONE_LAP,
        pauses=((LOAD_VALUES, PAUSE + LOAD_VALUES),),
    ),
    "v of e4m3 is given back before it was read": eight.Mutant(
        wrong=(
            (RELEASE_V_OF_8_BITS, ""),
            (PAUSE + PRODUCT + SCORES, RELEASE_V_OF_8_BITS + PAUSE + PRODUCT + SCORES),
        ),
        shape=LONG,
        pauses=((PRODUCT + SCORES, PAUSE + PRODUCT + SCORES),),
    ),
    "a product is added to sums of another maximum": eight.Mutant(
        wrong=(("fmaf(output[i], rows.rescale[i / 2 % 2], product[i])", "output[i] + product[i]"),),
        shape=LONG,
    ),
    "the product of the last tile is left out": eight.Mutant(
        wrong=(("      add(output, product, rows);\n", ""),),
        shape=ONE_LAP,
    ),
    "weights are handed on in the order of keys": eight.Mutant(
        wrong=(("four(s[0], s[1], s[4], s[5])", "four(s[0], s[4], s[1], s[5])"),),
        shape=LONG,
    ),
    "the log-sum-exp has the offset of weights": eight.Mutant(
        wrong=(("rows.maximum[r] - kOffset", "rows.maximum[r]"),),
        shape=ONE_LAP,
    ),
    "a tile has the scale of the keys beside it": eight.Mutant(
        wrong=(("of_tiles[n * kKvTile / 128", "of_tiles[max(0, n - 1) * kKvTile / 128"),),
        shape=LONG,
        kernel=eight.INT8,
    ),
    "a row of q has the scale of the row above": eight.Mutant(
        wrong=(("min(row + 8 * r, sequence", "min(max(0, row + 8 * r - 1), sequence"),),
        shape=LONG,
        kernel=eight.INT8,
    ),
    "sums of int8 are read as fp32": eight.Mutant(
        wrong=(("scores[i] = float(__float_as_int(scores[i]));", "scores[i] = scores[i] * 1;"),),
        shape=ONE_LAP,
        kernel=eight.INT8,
    ),
    "a row of 8 bits attends to the column right of the diagonal": eight.Mutant(
        wrong=(("row + 8 * r + p.right + 1)", "row + 8 * r + p.right + 2)"),),
        shape=Shape(2, 3, 3, 257, 257),
        kernel=eight.CAUSAL,
        keywords={"causal": "top_left"},
    ),
}
MUTANTS |= MUTANTS_OF_8_BITS


if __name__ == "__main__":
    mutants.main(MUTANTS)

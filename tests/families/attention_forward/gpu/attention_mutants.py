"""Runs attention kernels that are wrong in one place each, and prints what became of them, as JSON.

What a mutant does not wait for may have come by then, and its results be right by luck. So a kernel
is made to pause where the fault lies. A right one is right however slow it is: its text with the
pause, and without the fault, is run first and must pass. A clock is on the kernels alone: imports,
operands, references and compiling take as long as they take on a busy machine.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import attention_arena as arena
import attention_block_cases as blocks
import attention_cases as cases
import attention_key_cases as keys
import torch
from attention_cases import Shape

from warploom.generator.artifact import Artifact
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.workers import WorkerPool
from warploom.runtime import kernel as kernels
from warploom.runtime import plan

# 30,000 cycles are 15 to 20 us: what TMA was told to do before has long been done.
PAUSE = "    for (const auto since = clock64(); clock64() - since < 30000;) {}\n"
HANGS_SECONDS = 25  # a kernel that takes so long does; a right one takes milliseconds
# Two stages are few, and blocks are persistent.
PLAIN = cases.spec(128, 176, dim=128, pingpong=False, stages=2)
CAUSAL = cases.spec(128, 64, dim=64, mask="causal")

# Every block has one tile of rows, and as many kv tiles as stages: whoever does not wait cannot get
# a lap ahead of the producer, which would wait for it for ever.
ONE_LAP = Shape(1, 61, 61, 127, 349)
LONG = Shape(1, 61, 61, 127, 2777)
# 528 tiles of rows: at least three for each of 132 to 176 multiprocessors.
SEVERAL_TILES = Shape(4, 33, 11, 509, 349)

Edit = tuple[str, str]  # a text that is in the kernel, and what comes in its place
Clock = Callable[[], AbstractContextManager[None]]


@contextmanager
def clock(begun: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End the process where the kernels that are launched here do not end; `begun` is told."""
    begun()
    faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
    try:
        yield
        torch.cuda.synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True)
class Mutant:
    """A kernel, where it pauses, what is wrong with it, and a call that makes that show."""

    wrong: tuple[Edit, ...]
    shape: Shape
    pauses: tuple[Edit, ...] = ()
    kernel: KernelSpec = PLAIN
    keywords: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None  # of blocks
    keys: str | None = None  # a mask of them

    def sources(self) -> tuple[str, str]:
        """The text of the kernel that pauses, and of the one that is wrong too."""
        whole = edited(render(self.kernel), self.pauses)
        return whole, edited(whole, self.wrong)

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


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    for old, new in edits:
        if old not in text:
            raise LookupError(f"not in the text of the kernel: {old}")
        text = text.replace(old, new)
    return text


LOAD = "  full.arrive_and_expect_tx(kStageBytes);\n"
SLOW_LOADS = ((LOAD, PAUSE + LOAD),)
AWAIT_K = "    c.shared.k_full[c.position.stage].wait(c.position.phase);\n"
SCORES = "    multiply_scores(scores, c.q, c.staged_k());\n"
AWAIT_V = "    c.shared.v_full[before.stage].wait(before.phase);\n"
OUTPUT = "    multiply_output(output, weights, c.staged_v(before.stage));\n"
SCORES_THERE = (
    "    cute::warpgroup_wait<1>();  // the scores are there; the output's products run on\n"
    "    fence(scores);\n"
)
RELEASE_K = "    c.release_operands(n);\n"
RELEASE_Q = "    if (kQStages == 1 && n == begin) release_q();\n"
RELEASE_V = "    release(c.shared.v_empty[before.stage]);\n"
BIAS = "* p.bias_batch + head * p.bias_head + row * p.bias_row + column;\n"
AWAIT_WORDS = "    shared.words_full[at_words.stage].wait(at_words.phase);\n"
MAKE_WORDS = "    const uint4 state = read(0);\n"

MUTANTS = {
    "scores are multiplied before their k is there": Mutant(
        wrong=((AWAIT_K + "    c.turns.begin();\n" + SCORES, "    c.turns.begin();\n" + SCORES),),
        shape=ONE_LAP,
        pauses=SLOW_LOADS,
    ),
    # The last v is waited for, so that no block ends before its loads.
    "weights are multiplied before their v is there": Mutant(
        wrong=((AWAIT_V + OUTPUT + "    c.turns.pass", OUTPUT + "    c.turns.pass"),),
        shape=ONE_LAP,
        pauses=SLOW_LOADS,
    ),
    "k is given back before it was read": Mutant(
        wrong=(
            (SCORES_THERE + RELEASE_K, SCORES_THERE),
            (PAUSE + SCORES, RELEASE_K + PAUSE + SCORES),
        ),
        shape=LONG,
        pauses=(("    c.turns.begin();\n" + SCORES, "    c.turns.begin();\n" + PAUSE + SCORES),),
    ),
    "v is given back before it was read": Mutant(
        wrong=((RELEASE_V, ""), (PAUSE + OUTPUT, RELEASE_V + PAUSE + OUTPUT)),
        shape=LONG,
        pauses=((OUTPUT + "    c.turns.pass", PAUSE + OUTPUT + "    c.turns.pass"),),
    ),
    "q is given back before its last scores": Mutant(
        wrong=(
            (RELEASE_Q, ""),
            (PAUSE + SCORES, "    if (n == c.begin) c.release_q();\n" + PAUSE + SCORES),
        ),
        shape=SEVERAL_TILES,
        pauses=(("    c.turns.begin();\n" + SCORES, "    c.turns.begin();\n" + PAUSE + SCORES),),
    ),
    "the output is not rescaled when a maximum grows": Mutant(
        wrong=(("output[i] *= rows.rescale[i / 2 % 2];", "output[i] *= 1;"),),
        shape=LONG,
    ),
    "a row attends to the column right of the diagonal": Mutant(
        wrong=(("row + 8 * r + right(p) + 1)", "row + 8 * r + right(p) + 2)"),),
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


def compiled(mutants: Mapping[str, Mutant]) -> dict[str, tuple[Artifact, Artifact]]:
    """Compile both texts of each, all at once."""
    sources = {name: mutant.sources() for name, mutant in mutants.items()}
    with WorkerPool(2 * len(mutants)) as pool:
        futures = {
            name: [pool.submit(partial(compile_text, mutants[name].kernel, text)) for text in texts]
            for name, texts in sources.items()
        }
        return {name: (one.result(), two.result()) for name, (one, two) in futures.items()}


def compile_text(spec: KernelSpec, source: str, worker: Any) -> Artifact:  # noqa: ANN401
    artifact: Artifact = worker.compile(source, name=spec.name, arch=spec.arch)
    return artifact


def run(mutant: Mutant, artifact: Artifact, seed: int, clock: Clock) -> None:
    """Verify a call of the mutant's kernel with `artifact` in its place."""
    plan.forget()  # plans hold the kernel that was there before
    kernels._kernels[mutant.kernel] = kernels.Kernel(mutant.kernel, artifact)
    mutant.verify(seed, clock)


def judge(mutant: Mutant, whole: Artifact, wrong: Artifact, report: Callable[[str], None]) -> None:
    """Report `caught`, `survived`, or why it cannot be told.

    A kernel that hangs ends the process, so `hung` is what is reported when the wrong one begins.
    The two get different data: what the first left in shared memory would be right for the second.
    """
    try:
        run(mutant, whole, seed=1, clock=clock)
    except AssertionError as error:
        report(f"the kernel is wrong without the fault, too: {error}")
        return
    try:
        run(mutant, wrong, seed=2, clock=partial(clock, partial(report, "hung")))
    except AssertionError:
        report("caught")
    else:
        report("survived")


def main(mutants: Mapping[str, Mutant]) -> None:
    """Print what became of the mutants named in the arguments, or of all: a line of JSON for each.

    The last line about a mutant is the one that counts.
    """
    chosen = {name: mutants[name] for name in sys.argv[1:] or mutants}
    artifacts = compiled(chosen)
    for name, mutant in chosen.items():
        judge(
            mutant,
            *artifacts[name],
            lambda found, name=name: print(json.dumps({name: found}), flush=True),
        )


if __name__ == "__main__":
    main(MUTANTS)

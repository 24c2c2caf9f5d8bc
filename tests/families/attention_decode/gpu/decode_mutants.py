"""Runs decode kernels that are wrong in one place each; mutants.py says how and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import decode_arena as arena
import decode_cases as cases
import mutants
import torch
from decode_cases import Shape
from mutants import PAUSE, Clock, Edit

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime import kept
from warploom.runtime.launch_plan import LaunchPlan

ROOM = LaunchPlan._room
SCHEDULE = {"rows": 16, "keys": 64, "warps": 4, "stages": 2}
PLAIN = cases.spec(cases.operation(), **SCHEDULE)
SLOPING = cases.spec(cases.operation(mask="causal"), **SCHEDULE)
WINDOW = cases.spec(cases.operation(mask="window"), **SCHEDULE)
PAGES = cases.spec(cases.operation(page=16), **SCHEDULE)
TOKENS = cases.spec(cases.operation(cache="e4m3", scales="token"), **SCHEDULE)
INVARIANT = cases.spec(cases.operation(batch_invariant=True), **SCHEDULE)
ROWS = cases.spec(cases.operation(), **{**SCHEDULE, "rows": 32})
CLUSTER = cases.spec(cases.operation(), **SCHEDULE, cluster=4)
EIGHT = cases.spec(cases.operation(), **SCHEDULE, cluster=8)
PACKED = cases.spec(cases.operation(keys="packed", lengths=False), **SCHEDULE)

# Several tiles for each block of 132 to 176 multiprocessors, most items shared by several.
SHARED = Shape(5, 4, 4, 2, 9001)
# As much, of 32 rows that share keys.
MANY_ROWS = Shape(5, 4, 16, 2, 9001)
# Many more items than blocks: each has a few of them to itself.
WHOLE = Shape(61, 8, 4, 2, 700)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """A decode. `launches`: how many times, each with the same bits; `chained`: the next one reads
    the result; `lengths` of its sequences, else of every kind; `size` of q.
    """

    wrong: tuple[Edit, ...]
    shape: Shape = SHARED
    pauses: tuple[Edit, ...] = ()
    kernel: KernelSpec = PLAIN
    launches: int = 1
    chained: bool = False
    lengths: Sequence[int] | None = None
    size: float = 1.0

    def verify(self, seed: int, clock: Clock) -> None:
        """Assert that a call of its kernel, with a clock on it, is right."""
        kept._found.clear()  # where a mutant before left counters that are not 0
        shape = cases.fitting(self.kernel, self.shape)
        made = arena.call(self.kernel, shape, lengths=self.lengths, seed=seed, size=self.size)
        if self.chained:
            _verify_chain(made, clock)
            return
        found = arena.verify(made, clock=clock())
        first = [one.clone() for one in found]
        with clock():
            for _ in range(self.launches - 1):
                made.out.room.fill_(-1)
                again = made.run()
                assert all(map(arena.same_bits, again, first))


def _verify_chain(made: arena.Call, clock: Clock) -> None:
    """Assert that launches behind each other attend with the result of the one before."""
    keywords = {**made.keywords, "spec": made.spec, "scale": 4.0}
    values = [made.q.view.clone(), *(torch.empty_like(made.q.view) for _ in range(4))]
    with clock(), unpoisoned():  # nothing but the launches may be on the stream
        spare = torch.empty_like(values[0])
        warploom.attention_decode(*made.tensors, out=spare, **keywords)  # planned by now
        for one in values[1:]:
            one.fill_(torch.nan)
        torch.cuda._sleep(20_000_000)  # until all are launched: a call takes longer than a kernel
        for q, out in itertools.pairwise(values):
            warploom.attention_decode(q, *made.tensors[1:], out=out, **keywords)
    for q, out in itertools.pairwise(values):
        with clock():
            alone = warploom.attention_decode(q.clone(), *made.tensors[1:], **keywords)
        assert torch.equal(out, alone)


LOAD = "  if (lane() == 0) full.arrive_and_expect_tx(boxes * Tile::kBoxBytes);\n"
SLOW_LOADS = ((LOAD, PAUSE + LOAD),)
AWAIT_K = "  shared.k_full[position.stage].wait(position.phase);\n"
AWAIT_V = "  shared.v_full[position.stage].wait(position.phase);\n"
RELEASE_K, RELEASE_V = (f"  release_read(shared.{one}_empty[position.stage]);\n" for one in "kv")
READ_K = "  const uint32_t k = cute::cast_smem_ptr_to_uint(shared.k[position.stage])"
READ_V = "  const uint32_t v = cute::cast_smem_ptr_to_uint(shared.v[position.stage])"
COUNT = "    if (item.parts > 1 && warp * kRowsAtOnce < there && last_to_leave(warp)) combine();\n"
LAST = "    return before + 1 == item.parts;\n"
PART = "    const int64_t at = place(item.part_place, row);\n"
RESET = "      if (before + 1 == item.parts) *counter = 0;  // as the next launch must find it\n"
ORDER = "item.place_of(min(part + j, item.parts - 1))"
OF_WHO_ADDS = "item.place_of((min(part + j, item.parts - 1) + int(blockIdx.x)) % item.parts)"
CHUNKS = "apart * kDim * 4, part + j,"
ORDER_ROWS = "__shfl_sync(~0u, factor, from + j), found[i][j])"
ROWS_OF_WHO_ADDS = (
    ORDER_ROWS.replace("j)", "{0})").replace("[j]", "[{0}]").format("(j + blockIdx.x) % kParts")
)
LEFT = "      if (part > 0) synchronise_warps();\n"
NEXT = "    synchronise_warps();  // what was left of the item before has been read\n"
SEND = "    CUTE_UNROLL\n    for (int part = 0; part < kDim / kMerged; ++part) {\n"
SENT = "    CUTE_NO_UNROLL\n    for (int place = threadIdx.x; place < own;"
AWAIT_CLUSTER = (
    "    cute::cluster_wait();  // until all have read what was sent of the item before\n"
)
LEAVE_SUMS = "    leave_sums(shared, rows, exponent, warp);\n"
AWAIT_PARTS = "    shared.parts_full.wait(phase);\n"
SENT_READ = "at % kRowFours * 4, of_blocks(place), unit);\n    }\n"
STORE = "  const Row row = Row::at(p, item, in_tile);\n"
WAIT = 'asm volatile("griddepcontrol.wait;\\n'
SOMETIMES = "    if ((clock64() >> 12) % 3 == blockIdx.x % 3)\n"

MUTANTS = {
    "scores are multiplied before their k is there": Mutant(
        wrong=((AWAIT_K, ""),), pauses=SLOW_LOADS
    ),
    "weights are multiplied before their v is there": Mutant(
        wrong=((AWAIT_V, ""),), pauses=SLOW_LOADS
    ),
    "k is given back before it was read": Mutant(
        wrong=((RELEASE_K, ""), (PAUSE + READ_K, RELEASE_K + PAUSE + READ_K)),
        pauses=((READ_K, PAUSE + READ_K),),
    ),
    "v is given back before it was read": Mutant(
        wrong=((RELEASE_V, ""), (PAUSE + READ_V, RELEASE_V + PAUSE + READ_V)),
        pauses=((READ_V, PAUSE + READ_V),),
    ),
    "the key past the last one counts in the sum": Mutant(
        wrong=(("if (place >= end)", "if (place > end)"),), shape=WHOLE
    ),
    "a row attends to the key after its own": Mutant(
        wrong=(("keys - rows + r + p.right + 1)", "keys - rows + r + p.right + 2)"),),
        shape=WHOLE,
        kernel=SLOPING,
    ),
    "a row attends to one key before its window": Mutant(
        wrong=(("keys - rows + r - p.left)", "keys - rows + r - p.left - 1)"),),
        shape=WHOLE,
        kernel=WINDOW,
    ),
    "values that do not count are multiplied by 0": Mutant(
        wrong=((" && at < end_key ?", " ?"), (" && at + 1 < end_key ?", " ?")), shape=WHOLE
    ),
    "the output is not rescaled when a maximum grows": Mutant(
        wrong=(("outputs[f][i] *= rescale[i / 2];", "outputs[f][i] *= 1;"),), size=8.0
    ),
    "warps are added up without their maxima": Mutant(
        wrong=(
            ("const float factor = fast_exp2(sums[i].x - reference);", "const float factor = 1;"),
        ),
        size=4.0,
    ),
    "a block leaves out the last tile of its range": Mutant(
        wrong=(
            (
                "item.end = min(item.weight, stop - start);",
                "item.end = min(item.weight, max(item.begin + 1, stop - start - 1));",
            ),
        ),
    ),
    "boxes of a tile are all of its first page": Mutant(
        wrong=(("column - base + more)", "column - base)"),), kernel=PAGES
    ),
    "scales are those of the token beside": Mutant(
        wrong=(("min(key + in_tile,", "min(key + (in_tile ^ 1),"),), kernel=TOKENS
    ),
    "keys are those of the sequence before": Mutant(
        wrong=(
            ("{item.sequence.first_key + key +", "{max(0, item.sequence.first_key - 64) + key +"),
        ),
        kernel=PACKED,
    ),
    "the counter of an item is not reset": Mutant(wrong=((RESET, ""),), launches=3),
    "parts are added up before the last is there": Mutant(
        wrong=((LAST, LAST.replace("1", "2")),),
        pauses=((PART, PART + PAUSE),),
    ),
    "parts are added up in the order in which they come": Mutant(
        wrong=((ORDER, OF_WHO_ADDS),),
        pauses=((COUNT, SOMETIMES + PAUSE + COUNT),),
        launches=60,
    ),
    "chunks are added up by the maxima of others": Mutant(
        wrong=((CHUNKS, CHUNKS.replace("+ j", "+ (j ^ 1)")),), kernel=INVARIANT, size=4.0
    ),
    "parts of many rows are added up in the order in which they come": Mutant(
        wrong=((ORDER_ROWS, ROWS_OF_WHO_ADDS),),
        pauses=((COUNT, SOMETIMES + PAUSE + COUNT),),
        shape=MANY_ROWS,
        kernel=ROWS,
        launches=60,
    ),
    "a block counts one of its chunks": Mutant(
        wrong=(("count_up(counter, here);", "count_up(counter, 1);"),), kernel=INVARIANT
    ),
    "a chunk is not added to those before it": Mutant(
        wrong=(("item.from_first() && item.here > 0;", "false;"),),
        kernel=INVARIANT,
    ),
    "one chunk more counts as added up by the block with the first": Mutant(
        wrong=(("stop) + each - 1, each);", "stop) + 2 * each - 1, each);"),),
        kernel=INVARIANT,
    ),
    "what a cluster's blocks send is read before it came": Mutant(
        wrong=((AWAIT_PARTS, ""), (SENT_READ, SENT_READ + AWAIT_PARTS)),
        pauses=((SEND, PAUSE + SEND),),
        kernel=CLUSTER,
    ),
    "what a cluster's blocks send is overwritten before it was read": Mutant(
        wrong=((AWAIT_CLUSTER, ""), (AWAIT_PARTS, AWAIT_CLUSTER + AWAIT_PARTS)),
        pauses=((SENT, "    if (rank == 0)\n" + PAUSE + SENT),),
        kernel=CLUSTER,
        shape=WHOLE,
    ),
    # Rows of odd numbers go to other blocks: nothing in the first block waits for its last warp.
    "sums of a cluster's warps are overwritten before they were read": Mutant(
        wrong=((LEAVE_SUMS, ""), (AWAIT_CLUSTER, LEAVE_SUMS + AWAIT_CLUSTER)),
        pauses=(
            (
                "        const Total total = of_warps(shared, row",
                "    if (threadIdx.x >= 96 && rank == 0)\n"
                + PAUSE
                + "        const Total total = of_warps(shared, row",
            ),
        ),
        kernel=EIGHT,
        shape=Shape(60, 4, 4, 1, 700),
        lengths=[700, 0] * 30,
    ),
    "a cluster's blocks leave out a tile": Mutant(
        wrong=(
            (
                "item.weight * (rank + 1) / kCluster;",
                "item.weight * (rank + 1) / kCluster - (rank == 1);",
            ),
        ),
        kernel=CLUSTER,
    ),
    "what warps leave is overwritten before it was read": Mutant(
        wrong=((NEXT, ""), (LEFT, "")),
        pauses=(
            (
                "        const Total total = of_warps(shared, row",
                "    if (threadIdx.x < 32)\n"
                + PAUSE
                + "        const Total total = of_warps(shared, row",
            ),
        ),
        shape=WHOLE,
    ),
    "q is read before the launch before is done": Mutant(
        wrong=((WAIT, 'asm volatile("'),),
        pauses=((STORE, STORE + PAUSE),),
        shape=Shape(1, 4, 4, 2, 1000),  # blocks for half of the multiprocessors
        chained=True,
    ),
}


def poison_workspaces() -> None:
    """What a launch finds in its workspaces is NaN: a part that was not left is seen."""

    def full(plan: LaunchPlan, stream: int) -> torch.Tensor:
        return ROOM(plan, stream).fill_(255)

    LaunchPlan._room = full  # type: ignore[method-assign]


@contextmanager
def unpoisoned() -> Iterator[None]:
    """Without that: what fills a workspace keeps launches apart that may overlap."""
    found, LaunchPlan._room = LaunchPlan._room, ROOM  # type: ignore[method-assign]
    try:
        yield
    finally:
        LaunchPlan._room = found  # type: ignore[method-assign]


if __name__ == "__main__":
    poison_workspaces()
    mutants.main(MUTANTS)

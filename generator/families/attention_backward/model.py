"""How long an attention's backward pass takes: rows before it, blocks of k and v, rows after it.

A block keeps one tile of k and v and goes through the tiles of q that see it, of every head that
shares its keys; the blocks of a cluster share these heads out, and sum the gradients. A step
multiplies five times; where the head dimension is above 128 and two blocks share columns of the
gradients, each computes all scores: seven products in all. Shared memory feeds the products, holds
ds and stages dq, and is what a step waits for most; the tensor core and L2 work beside it. What is
computed of the scores, and dq added from registers, is partly added to that. The preprocess and
postprocess kernels move bytes, and do nothing else that takes time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from warploom.generator.architectures import architecture
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families._attention.modifiers import COSTS, exponentials
from warploom.generator.families.attention_backward.layout import (
    AttentionBackwardLayout,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.gpus import DEFAULT
from warploom.generator.launches import DeviceLimits
from warploom.generator.model.arithmetic import Value, slowest
from warploom.generator.wgmma import WGMMA_M

# Where a fit begins, and what it is drawn to where measurements do not tell. The clocks and what is
# exposed are rounded from the first times of these kernels on an H200.
START = {
    "launch": 6e-6,  # seconds of the three launches in a graph
    "tensor_clock": 1.8e9,  # of the tensor core under load, in Hz
    "shared_clock": 1.55e9,  # of shared memory, which has 128 bytes a cycle
    "exponential_clock": 1.6e9,  # of the special function units: 16 exponentials a cycle
    "arithmetic": 2e-11,  # seconds of one score's other work on one multiprocessor
    "overlapped": 0.85,  # of the scores' work that is not hidden
    "serial": 0.7,  # the same without overlap
    "free": 0.3,  # more of it where one warpgroup has nobody else's products beside it
    "direct_bandwidth": 1.3e11,  # bytes a second of dq that one multiprocessor adds from registers
    "l2_bandwidth": 1e11,  # bytes a second that one multiprocessor gets of L2
    "misaligned": 0.5,  # more of q's and do's, where rows of a head begin within its sectors
    "latency": 8e-7,  # seconds from a TMA request to its data, which one stage does not hide
    "step": 1e-7,  # seconds of a step that nothing hides: barriers, first wait
    "turn": 2e-7,  # more of it where blocks add to dq in turn
    "block": 2.8e-6,  # seconds of a block beside its steps: k and v, the first q, dk and dv
    "gathering": 5e-7,  # seconds more of it for each other block of a cluster, which it waits for
    "uneven": 0.2,  # of the longest block, that the last multiprocessor takes longer
    **COSTS,
    "hbm_bandwidth": 3.5e12,  # bytes a second of memory, in the kernels of rows
}
SECTOR = 32  # bytes that L2 reads at least
PREPROCESS_BYTES, POSTPROCESS_BYTES = 2 + 2 + 4, 4 + 2  # an element: o, do, zeros; sums and dq


@dataclass(frozen=True, slots=True)
class Blocks:
    """The main kernel's blocks: how many, and the steps of the longest and of the mean one."""

    count: float
    longest: float
    mean: float

    @classmethod
    def of(
        cls,
        operation: AttentionBackwardOperation,
        schedule: AttentionBackwardSchedule,
        shape: AttentionShape,
        parts: int,
    ) -> Blocks:
        """Count the tiles of k and v, and the tiles of q that see one of them.

        Under a mask the first tile is seen by all rows, the last by its own alone.
        """
        packed = bool(shape.total_q)
        rows, columns = float(shape.seq_q), float(shape.seq_k)
        tiles = shape.batch * -(-columns // schedule.kv_tile)
        if packed:
            rows, columns = shape.packed_rows[1], shape.packed_columns[1]
            tiles = max(shape.batch, shape.total_k / schedule.kv_tile + shape.batch / 2)
        longest, mean = float(shape.seq_q), rows
        apart, diagonal = gcd(schedule.q_tile, schedule.kv_tile), shape.seq_k - shape.seq_q
        even = not packed or (shape.total_q, shape.seq_q) == (shape.total_k, shape.seq_k)

        def beyond(bound: int) -> float:
            """What of q tiles lies beyond a bound, which moves by kv_tile from block to block."""
            least = bound % apart if even else apart / 2
            return (least + (schedule.q_tile - apart) / 2) / schedule.q_tile

        ends = 0.0
        if operation.mask != "none":
            # Rows see `columns` less the ramp of the diagonal, which ends at the bottom right.
            mean = rows * (1 - min(rows, columns) / 2 / columns) + schedule.kv_tile / 2
            ends = beyond(-diagonal)
        width = shape.window + schedule.kv_tile - 1
        if shape.window and width < longest:
            longest, mean = width, min(mean, width)
            ends += beyond(diagonal - shape.window + 1)
        elif shape.window > rows:  # a bound on the right alone would be a causal mask
            mean = (rows * columns - _corners(shape.window // 2, rows, columns)) / columns
        # A cluster ends with its last block, which has the most heads.
        heads = -(-shape.sharing // schedule.cluster)

        def steps(seen: float, most: float) -> float:
            tall = most / schedule.q_tile + 0.5 if packed else -(-most // schedule.q_tile)
            if seen >= most:
                return heads * max(1.0, tall)
            return heads * max(1.0, min(tall, seen / schedule.q_tile + ends))

        return cls(
            count=tiles * shape.kv_heads * parts * schedule.cluster,
            longest=steps(longest, shape.seq_q),
            mean=steps(mean, rows),
        )


def _corners(half: int, rows: float, columns: float) -> float:
    """Scores that a window hides that leaves `half` columns on either side of the diagonal."""
    return sum(max(0.0, extent - half) ** 2 / 2 for extent in (rows, columns))


def seconds(
    constants: Value,
    operation: AttentionBackwardOperation,
    schedule: AttentionBackwardSchedule,
    shape: AttentionShape,
    multiprocessors: int,
) -> float:
    """Predict the time of the three launches; shapes without scores take the launches alone."""
    if not (shape.batch and shape.heads and shape.seq_q and shape.seq_k):
        return constants["launch"]
    layout = attention_backward_layout(architecture(DEFAULT.arch), operation, schedule)
    blocks = Blocks.of(operation, schedule, shape, layout.parts)
    step = _step(constants, operation, schedule, layout, shape)
    once = constants["block"] + _sums(constants, schedule, layout)
    mean, longest = (steps * step + once for steps in (blocks.mean, blocks.longest))
    size = schedule.cluster_size
    at_a_time = size * DeviceLimits(multiprocessors).clusters(size)
    rounds = blocks.count / at_a_time
    if operation.mask == "none" and operation.lengths == "fixed":
        work = -(-blocks.count // at_a_time) * mean
    else:
        work = max(longest, rounds * mean + constants["uneven"] * longest)
    return constants["launch"] + work + _rows(constants, operation, schedule, shape)


def _sums(
    constants: Value, schedule: AttentionBackwardSchedule, layout: AttentionBackwardLayout
) -> float:
    """Seconds in which a cluster's block lays down its fp32 dk and dv, and reads as much of all."""
    if schedule.cluster == 1:
        return 0.0
    gradients = 2 * schedule.kv_tile * layout.columns * 4
    return 2 * gradients / 128 / constants["shared_clock"] + constants["gathering"] * (
        schedule.cluster - 1
    )


def _rows(
    constants: Value,
    operation: AttentionBackwardOperation,
    schedule: AttentionBackwardSchedule,
    shape: AttentionShape,
) -> float:
    """Seconds of the kernels before and after: they work on whole tiles of q."""
    if shape.total_q:
        rows = shape.total_q + shape.batch * schedule.q_tile / 2
    else:
        rows = shape.batch * schedule.q_tile * -(-shape.seq_q // schedule.q_tile)
    moved = rows * shape.heads * operation.dim * (PREPROCESS_BYTES + POSTPROCESS_BYTES)
    return moved / constants["hbm_bandwidth"]


def _step(
    constants: Value,
    operation: AttentionBackwardOperation,
    schedule: AttentionBackwardSchedule,
    layout: AttentionBackwardLayout,
    shape: AttentionShape,
) -> float:
    """Seconds of one step of all warpgroups of a block."""
    q, kv, dim = schedule.q_tile, schedule.kv_tile, operation.dim
    # Scores and dp of the whole head dimension, dk, dv and dq of the block's part of it; or of its
    # rows of k and v all but dq. The tensor core does 2048 multiplications of 16 bits a cycle.
    gradients = layout.columns if schedule.cluster_split == "columns" else dim
    products = layout.kv_rows * (2 * dim + 2 * gradients) + kv * layout.columns
    tensor = q * products / 2048 / constants["tensor_clock"]
    shared = _shared_bytes(operation, schedule, layout) / 128 / constants["shared_clock"]
    sums = q * layout.columns * 4
    loaded = 2.0 * 2 * q * shape.dim
    if 2 * shape.dim % SECTOR:
        loaded *= 1 + constants["misaligned"]
    l2 = (loaded + sums) / constants["l2_bandwidth"]
    cap = exponentials(constants, operation.modifiers)
    arithmetic = 1 / 16 / constants["exponential_clock"] + constants["arithmetic"]
    scores = cap * q * layout.kv_rows * arithmetic
    exposed = constants["overlapped" if schedule.overlap else "serial"]
    if schedule.warpgroups == 1:
        exposed += constants["free"]
    step = slowest(tensor, shared, l2) + exposed * scores + constants["step"]
    if schedule.accumulate == "direct":
        step += sums / constants["direct_bandwidth"]
    if schedule.stages == 1:
        step += constants["latency"]
    if operation.deterministic:
        step += constants["turn"]
    return step


def _shared_bytes(
    operation: AttentionBackwardOperation,
    schedule: AttentionBackwardSchedule,
    layout: AttentionBackwardLayout,
) -> int:
    """Bytes of shared memory that a step reads and writes.

    Each warpgroup multiplies 64 rows: of scores and dp both operands lie in shared memory, but for
    what is held of v, of dv and dk one, of dq both again. Beside that q and do arrive, ds is
    written, and, where dq is added in bulk, its fp32 sums are written and read. Blocks that share
    rows have p in shared memory, too, and send each other ds.
    """
    q, kv, dim = schedule.q_tile, schedule.kv_tile, operation.dim
    scores = (2 * (WGMMA_M + layout.q_rows) * dim - WGMMA_M * 16 * layout.held_steps) * 2
    weights = 0 if schedule.cluster_split == "columns" else WGMMA_M  # columns of p, and of ds
    gradients = 2 * q * (layout.columns + weights) * 2
    queries = (WGMMA_M + layout.query_n) * kv * 2
    products = schedule.warpgroups * (scores + gradients + queries)
    arriving = 2 * q * dim * 2
    staged = 2 * layout.sums_bytes
    written = q * layout.kv_rows * 2 + layout.p_bytes // 2
    exchanged = layout.p_bytes  # of ds: as much leaves as comes
    return products + arriving + written + exchanged + staged

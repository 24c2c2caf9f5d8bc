"""The backward's shared memory and registers, derived from operation and schedule.

A tile of q, k, v or do lies as boxes side by side: of the head dimension, each as wide as the
widest swizzle span that divides what a warpgroup has of it. All figures are bytes, or 32-bit
registers of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.families._attention.layout import Boxes, staging_bytes, word_bytes
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.tensor_maps import LAYOUT_TYPES, widest_span
from warploom.generator.wgmma import WGMMA_M

# What setmaxnreg shares out, by consumers: (producer, consumer). For one nothing is; it could have
# 255, but of those with overlap that are expected to need 244 ptxas serialises some.
REGISTERS = {1: (0, 240), 2: (24, 240)}
# Where warps of the producer's make random words.
REGISTERS_DROPOUT = {1: (0, 240), 2: (40, 232)}
REGISTERS_DROPOUT_LISTED = {1: (0, 240), 2: (56, 224)}  # where they read lists as well
# Without overlap, (dim, q_tile, caps, accumulate) that ptxas spills although there is room: of
# all kernels of q_tile 80 and more, compiled, these alone.
SPILLED = {
    *((32, 128, True, accumulate) for accumulate in ("bulk", "direct")),
    *((64, 112, True, accumulate) for accumulate in ("bulk", "direct")),
    (64, 128, True, "bulk"),
    (64, 144, False, "bulk"),
}
# Of a cap with overlap where blocks share rows, (dim, q_tile) that spill two registers of what
# the block is to do; kept in shared memory, as packed lengths have it, it leaves room.
CROWDED_CAPS = {(256, 64)}
HELD = {"none": 0, "half": 0.5, "all": 1}  # of v
# What products in flight, masks and so on take beside accumulators and 16-bit operands; without
# overlap the compiler saves some of what is counted. Fitted: what these let in compiles without
# spills (tests/property/test_compiled.py tries a sample).
SERIAL_REGISTERS, OVERLAP_REGISTERS, OVERLAP_PACKED_REGISTERS = -4, 24, 16
OVERLAP_MASK_REGISTERS, OVERLAP_PARTS_REGISTERS = 4, 12
ROWS_HIDES_REGISTERS = 12  # of a pair with overlap that shares rows
BARRIERS = 1024
ALIGNMENT = 1024  # of swizzled tiles
TMA_BYTES = 128  # that an address in shared memory is a multiple of where TMA writes
HELD_REGISTERS = 12  # beside those that hold v
WARPS, WARP_COLUMNS = 4, 16  # of a warpgroup; of a warp
MINIMUM_SPAN = 16  # bytes: no swizzle
WIDEST = 128  # columns of dk and of dv that a block has accumulators for


@dataclass(frozen=True, slots=True)
class AttentionBackwardLayout(Boxes):
    """Where everything of one block lies, and how blocks and warpgroups share out the gradients.

    Accumulators of 64 rows of dk and dv have room for 128 columns. Wider heads take two blocks for
    a kv tile. Where they share columns, each computes all its scores, and half the `columns` of the
    gradients. Where they share rows, each has 64 rows of k and v: its warpgroups share the scores
    by rows of q, and dk and dv by columns; of dq each block adds half the columns.

    dq = ds k has rows of q. Where their number is no multiple of 64 its transpose is computed
    (`swap`), with rows of the head dimension. The warpgroups share its 64-row `blocks`, and where
    there are fewer of them than warpgroups also its columns, in `splits` parts.
    """

    parts: int  # that the columns of dq, dk and dv are shared out in, to one block each
    columns: int  # of one part
    kv_rows: int  # rows of k and v that a block has
    q_rows: int  # rows of q whose scores a warpgroup computes
    held_steps: int  # of 16 columns: those of v that a warpgroup has in registers
    value_columns: int  # of one part, of v
    v_span: int  # bytes of a row of a box of v, and of do
    kv_bytes: int  # of k
    v_bytes: int
    peer_bytes: int  # of the peer's k, in the columns of dq that the block adds
    q_bytes: int  # of one stage of q
    do_bytes: int  # of one stage of do
    statistics: int  # of a row of q: lse, delta and, with a bias, what lse lacks
    statistics_bytes: int  # of one stage
    p_bytes: int  # of both stages, where dv is multiplied from shared memory
    ds_bytes: int  # of one stage, of the whole kv tile
    ds_stages: int  # two where there is room, so that nobody waits for one to be free
    sums_bytes: int  # staging of dq
    staging_bytes: int  # of a bias and a mask, of all warps
    words_bytes: int  # of both stages: which weights are kept
    stages: int  # of q
    do_stages: int
    swap: bool
    blocks: int
    splits: int
    query_n: int  # columns of one warpgroup's share of dq
    registers: int  # that a consumer's thread is expected to need
    producer_registers: int  # that a producer's thread keeps; 0: nothing is reallocated
    register_budget: int  # that a consumer's thread may have

    @property
    def v_layout_type(self) -> int:
        """The descriptor's swizzle mode of v and do."""
        return LAYOUT_TYPES[self.v_span]

    def span_of(self, tensor: str) -> int:
        """Bytes of a box's row of an operand; where dq will be is read as do is."""
        return self.v_span if tensor in ("v", "do", "dq", "dv") else self.span

    @property
    def word_stages(self) -> int:
        """Stages of words: which weights are kept."""
        return 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the main launch."""
        stages = self.stages * (self.q_bytes + self.statistics_bytes)
        stages += self.do_stages * self.do_bytes
        scores = self.p_bytes + self.ds_stages * self.ds_bytes
        every = self.kv_bytes + self.v_bytes + self.peer_bytes + stages + scores + self.sums_bytes
        every += self.staging_bytes + self.words_bytes + BARRIERS
        return -(-every // ALIGNMENT) * ALIGNMENT  # as long as the struct that the kernel declares


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def attention_backward_layout(
    arch: Architecture, operation: AttentionBackwardOperation, schedule: AttentionBackwardSchedule
) -> AttentionBackwardLayout:
    """Lay out a schedule, legal or not."""
    bits = element(operation.element).bits
    row_bytes = operation.dim * bits // 8
    parts = -(-operation.dim // WIDEST)
    part = operation.dim // parts
    value_part = operation.dim_v // parts or part
    value_row_bytes = (operation.dim_v or operation.dim) * bits // 8
    swap = schedule.q_tile % WGMMA_M != 0
    rows, columns = (part, schedule.q_tile) if swap else (schedule.q_tile, part)
    blocks = max(1, rows // WGMMA_M)
    splits = max(1, schedule.warpgroups // blocks)
    query_n = columns // splits
    # A box is of one part, and of one warpgroup's share: no descriptor begins within one.
    span = widest_span(part if swap else query_n, bits) or MINIMUM_SPAN
    v_span = widest_span(value_part, bits) if operation.dim_v else span
    shared_out = REGISTERS
    if operation.dropout:
        shared_out = REGISTERS_DROPOUT_LISTED if operation.blocks else REGISTERS_DROPOUT
    producer_registers, register_budget = shared_out[schedule.warpgroups]
    shares_rows = schedule.cluster_split == "rows"
    kv_rows = WGMMA_M if shares_rows else schedule.kv_tile
    q_rows = schedule.q_tile // schedule.warpgroups if shares_rows else schedule.q_tile
    ds_bytes = schedule.q_tile * schedule.kv_tile * bits // 8
    held_steps = (
        int(HELD[schedule.v_in_registers] * operation.dim) // element(operation.element).wgmma_k
    )
    statistics = 2 if operation.bias == "none" else 3
    layout = AttentionBackwardLayout(
        parts=parts,
        columns=part,
        kv_rows=kv_rows,
        q_rows=q_rows,
        span=span,
        boxes=row_bytes // span,
        held_steps=held_steps,
        value_columns=value_part,
        v_span=v_span,
        kv_bytes=kv_rows * row_bytes,
        v_bytes=kv_rows * value_row_bytes,
        peer_bytes=kv_rows * row_bytes // parts if shares_rows else 0,
        q_bytes=schedule.q_tile * row_bytes,
        do_bytes=schedule.q_tile * value_row_bytes,
        statistics=statistics,
        statistics_bytes=-(-statistics * 4 * schedule.q_tile // TMA_BYTES) * TMA_BYTES,
        p_bytes=ds_bytes if shares_rows else 0,  # two stages, of half the kv tile
        ds_bytes=ds_bytes,
        ds_stages=1,
        sums_bytes=schedule.q_tile * part * 4 if schedule.accumulate == "bulk" else 0,
        staging_bytes=WARPS * schedule.warpgroups * staging_bytes(operation, q_rows, WARP_COLUMNS),
        words_bytes=word_bytes(schedule.q_tile, schedule.kv_tile) if operation.dropout else 0,
        stages=schedule.stages,
        do_stages=1 if schedule.single_do else schedule.stages,
        swap=swap,
        blocks=blocks,
        splits=splits,
        query_n=query_n,
        registers=_registers(operation, schedule, q_rows, (part, value_part), query_n)
        + (4 * held_steps + HELD_REGISTERS if held_steps else 0),
        producer_registers=producer_registers,
        register_budget=register_budget,
    )
    twice = replace(layout, ds_stages=2)
    once = schedule.overlap or shares_rows or twice.shared_bytes > arch.shared_bytes
    return layout if once else twice


def _registers(
    operation: AttentionBackwardOperation,
    schedule: AttentionBackwardSchedule,
    q_rows: int,
    parts: tuple[int, int],
    query_n: int,
) -> int:
    columns, value_columns = parts  # of dk, and of dv
    scores, weights, gradients = q_rows // 2, q_rows // 4, (columns + value_columns) // 2
    first = 2 * scores + weights  # p, dp and p in 16 bits, before and while dv is multiplied
    if schedule.overlap:
        second = query_n // 2 + scores + weights  # dq and the next scores, while dk is multiplied
        beside = OVERLAP_REGISTERS
        if schedule.cluster_split == "columns":  # with rows there is room to spare
            beside += (
                (operation.lengths == "packed") * OVERLAP_PACKED_REGISTERS
                + (operation.mask != "none") * OVERLAP_MASK_REGISTERS
                + (columns < operation.dim) * OVERLAP_PARTS_REGISTERS
            )
        elif operation.hides:
            beside += ROWS_HIDES_REGISTERS
    else:
        second = query_n // 2 + 2 * weights  # dq, while dk is multiplied
        beside = SERIAL_REGISTERS
    changing, most = 0, []
    for modifier in operation.modifiers:
        beside += modifier.backward_registers(schedule, q_rows, columns)
        changing += modifier.backward_score_registers()
        most.append(modifier.most_score_registers(schedule))
    return gradients + max(first, second) + beside + min([changing, *most])

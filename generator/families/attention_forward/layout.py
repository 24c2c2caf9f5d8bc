"""Attention's shared memory and registers, derived from operation and schedule.

A tile of q, k, v or o lies as boxes side by side: of the head dimension, each as wide as the widest
swizzle span that divides it. All figures are bytes, or 32-bit registers of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from warploom.generator.architectures import Architecture
from warploom.generator.families._attention.layout import (
    WARP_ROWS,
    Boxes,
    staging_bytes,
    word_bytes,
)
from warploom.generator.families._attention.modifiers.modifier import MOST_SCORES_REGISTERS
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
)
from warploom.generator.tensor_maps import LAYOUT_TYPES, widest_span
from warploom.generator.wgmma import WGMMA_M

# What setmaxnreg shares out, by consumers: (producer, consumer). 24 + 2 * 240 is the 504 that 384
# threads may hold, 32 + 3 * 160 the 512 of 512 threads; two warpgroups have enough without.
REGISTERS = {1: (0, 255), 2: (24, 240), 3: (32, 160)}
# Where the producer has more to reckon: which sequence, two bounds, or which tile is next.
REGISTERS_WIDE = {**REGISTERS, 2: (40, 232)}
# Where warps of the producer's make random words.
REGISTERS_DROPOUT = {**REGISTERS, 2: (56, 224), 3: (56, 152)}
# Where they read lists as well; three warpgroups walk none.
REGISTERS_DROPOUT_LISTED = {1: (0, 255), 2: (72, 216)}
# Beside scores, output and weights: of every kernel, and what some need on top. Fitted: the widest
# tiles that these let in compile without spills.
BASE_REGISTERS = 28
# The same where q and k are of 8 bits; what rescaling the output takes, and three consumers.
BASE_REGISTERS_OF_EIGHT, RESCALING_REGISTERS, CROWDED_REGISTERS = 16, 12, 8
PACKED_REGISTERS, WINDOW_REGISTERS = 4, 4
PACKED_SCORES_REGISTERS = 8  # beside those of packed lengths, where scores are changed
PACKED_LONG_REGISTERS = 12  # found by compiling: more of tiles beyond 128 columns

BARRIERS_AND_WORK_BYTES = 1024
WARPS = 4  # of a warpgroup


@dataclass(frozen=True, slots=True)
class AttentionLayout(Boxes):
    """Where everything of one block lies."""

    q_bytes: int  # of one warpgroup's q
    kv_bytes: int  # of one stage of k, and of v where that is of the same type
    v_bytes: int  # of one stage of v
    v_span: int  # bytes of a row of v's boxes
    warpgroups: int
    staging_bytes: int  # of a bias and a mask, of all warps
    stages: int
    word_stages: int  # of which weights are kept: 2, or 1 where there is no room
    words_bytes: int  # of all stages
    q_stages: int  # 2 where there is room: the next tile's q arrives under this one's work
    registers: int  # that a consumer's thread is expected to need
    producer_registers: int  # that a producer's thread keeps; 0: nothing is reallocated
    register_budget: int  # that a consumer's thread may have

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        q_bytes = self.q_stages * self.warpgroups * self.q_bytes
        kv_bytes = self.stages * (self.kv_bytes + self.v_bytes)
        changing = self.staging_bytes + self.words_bytes  # scores, and weights
        return q_bytes + kv_bytes + changing + BARRIERS_AND_WORK_BYTES

    @property
    def v_layout_type(self) -> int:
        """The descriptor's swizzle mode of v."""
        return LAYOUT_TYPES[self.v_span]

    def span_of(self, tensor: str) -> int:
        """Bytes of a box's row of an operand."""
        return self.v_span if tensor == "v" else self.span


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def attention_layout(
    arch: Architecture, operation: AttentionOperation, schedule: AttentionSchedule
) -> AttentionLayout:
    """Lay out a schedule, legal or not."""
    bits, v_bits = operation.element_of("k").bits, operation.element_of("v").bits
    span = widest_span(operation.dim, bits)
    q_bytes = WGMMA_M * operation.dim * bits // 8
    kv_bytes = schedule.kv_tile * operation.dim * bits // 8
    dim_v = operation.dim_v or operation.dim
    v_bytes = schedule.kv_tile * dim_v * v_bits // 8
    # v of 8 bits lies dim-major: a box's row is of keys.
    v_row = dim_v if operation.weights == "same" else schedule.kv_tile
    wide = (
        operation.lengths == "packed"
        or operation.mask == "window"
        or operation.blocks
        or schedule.scheduler == "dynamic"
    )
    producer_registers, register_budget = (REGISTERS_WIDE if wide else REGISTERS)[
        schedule.warpgroups
    ]
    staging = WARPS * schedule.warpgroups * staging_bytes(operation, WARP_ROWS, schedule.kv_tile)
    if operation.dropout:
        shared_out = REGISTERS_DROPOUT | (REGISTERS_DROPOUT_LISTED if operation.blocks else {})
        producer_registers, register_budget = shared_out[schedule.warpgroups]
    all_q = schedule.warpgroups * q_bytes
    once = schedule.stages * (kv_bytes + v_bytes) + staging + BARRIERS_AND_WORK_BYTES
    word_stages = words_bytes = 0
    if operation.dropout:
        twice = word_bytes(schedule.q_tile, schedule.kv_tile)
        word_stages = 2 if once + all_q + twice <= arch.shared_bytes else 1
        words_bytes = word_bytes(schedule.q_tile, schedule.kv_tile, word_stages)
    twice_fits = once + words_bytes + 2 * all_q <= arch.shared_bytes
    return AttentionLayout(
        span=span,
        boxes=operation.dim * bits // 8 // span,
        q_bytes=q_bytes,
        kv_bytes=kv_bytes,
        v_bytes=v_bytes,
        v_span=widest_span(v_row, v_bits),
        staging_bytes=staging,
        warpgroups=schedule.warpgroups,
        stages=schedule.stages,
        word_stages=word_stages,
        words_bytes=words_bytes,
        q_stages=2 if twice_fits else 1,
        registers=_registers(operation, schedule),
        producer_registers=producer_registers,
        register_budget=register_budget,
    )


def _registers(operation: AttentionOperation, schedule: AttentionSchedule) -> int:
    # Without overlap, too, scores and weights are live together: while the ones become the others.
    scores, weights = schedule.kv_tile // 2, schedule.kv_tile // 4
    output = (operation.dim_v or operation.dim) // 2
    if operation.eight:
        return _registers_of_eight(operation, schedule)
    return (
        scores
        + output
        + weights
        + BASE_REGISTERS
        + (PACKED_REGISTERS if operation.lengths == "packed" else 0)
        + (WINDOW_REGISTERS if operation.mask == "window" else 0)
        + sum(modifier.forward_registers(schedule) for modifier in operation.modifiers)
        + _score_registers(operation, schedule)
    )


def _registers_of_eight(operation: AttentionOperation, schedule: AttentionSchedule) -> int:
    scores, output = schedule.kv_tile // 2, operation.dim // 2
    weights = schedule.kv_tile * operation.element_of("v").bits // 64
    product = output if operation.promoted else 0
    return (
        scores
        + product
        + output
        + weights
        + BASE_REGISTERS_OF_EIGHT
        + (CROWDED_REGISTERS if schedule.warpgroups > 2 else 0)
        + (0 if operation.promoted else RESCALING_REGISTERS)
        + (PACKED_REGISTERS if operation.lengths == "packed" else 0)
        + (WINDOW_REGISTERS if operation.mask == "window" else 0)
    )


def _score_registers(operation: AttentionOperation, schedule: AttentionSchedule) -> int:
    packed = operation.lengths == "packed" and operation.scored
    registers = sum(modifier.forward_score_registers() for modifier in operation.modifiers)
    registers = min(registers + packed * PACKED_SCORES_REGISTERS, MOST_SCORES_REGISTERS)
    return registers + (packed and schedule.kv_tile > 128) * PACKED_LONG_REGISTERS

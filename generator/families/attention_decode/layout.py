"""Shared memory and registers of a decode kernel, derived from operation and schedule.

A stage of k or of v is boxes of rows, one for each page that it touches; a box is pieces of the
head dimension, each as wide as the widest swizzle span that divides it. All figures are bytes, or
32-bit registers of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.schedule import WARP_ROWS, DecodeSchedule
from warploom.generator.tensor_maps import widest_span

MULTIPROCESSOR_BYTES, BLOCK_BYTES = 233_472, 1024  # shared memory, and what each block takes of it
LANES, PARTITIONS = 512, 4  # registers that a lane of a quarter of a multiprocessor shares out
LARGEST_BOX = 64  # rows: no more than so many past the last key are read
# Outputs that warps of the same rows leave for each other at a time, of so many columns.
MERGED_BYTES = 32_768
MERGED_COLUMNS = (128, 64, 32)
STAGE_BARRIERS_BYTES = 32  # two of k, and two of v
# Of addresses, sums, and what is read and decoded; and of each 16 keys that a warp has of a tile,
# whose scores are there at a time. No kernel of 80 that has these spilled (NVRTC 13.0).
BASE_REGISTERS, SLICE_REGISTERS = 50, 12
CLUSTER_REGISTERS = 8  # more where a cluster shares items: two of 125 spilled, of dimension 256


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """Where everything of one block lies."""

    span: int  # bytes of a piece's row
    pieces: int  # side by side in a row
    box_rows: int
    boxes: int  # of a stage
    stage_bytes: int  # of k, or of v
    scale_bytes: int  # of one stage: factors of its rows, of k and of v
    stages: int
    merged_columns: int  # of outputs that warps leave for each other at a time
    merged_bytes: int
    sums_bytes: int  # maxima and sums of rows, of every warp
    parts_bytes: int  # what blocks of a cluster send of an item
    registers: int  # that a thread is expected to need
    register_budget: int  # that it may have

    @property
    def ring_bytes(self) -> int:
        """Bytes of one stage of k, of v, of their factors, and of its barriers."""
        return 2 * self.stage_bytes + self.scale_bytes + STAGE_BARRIERS_BYTES

    @property
    def fixed_bytes(self) -> int:
        """Everything but the stages."""
        return self.merged_bytes + self.sums_bytes + self.parts_bytes + BLOCK_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        return self.stages * self.ring_bytes + self.fixed_bytes


def room(schedule: DecodeSchedule) -> int:
    """Shared memory that a block may have, as many as are to fit on a multiprocessor."""
    return MULTIPROCESSOR_BYTES // schedule.ctas_per_sm - BLOCK_BYTES


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def decode_layout(operation: DecodeOperation, schedule: DecodeSchedule) -> DecodeLayout:
    """Lay out a schedule, legal or not."""
    kv = operation.kv
    row_bytes = operation.dim * kv.bytes
    span = widest_span(operation.dim, kv.bits)
    box_rows = min(schedule.keys, operation.page or LARGEST_BOX)
    warp_column = 4 * schedule.warps * WARP_ROWS  # one column of every warp's rows
    fit = MERGED_BYTES // schedule.ctas_per_sm**2 // warp_column
    merged = max(
        [one for one in MERGED_COLUMNS if one <= fit and operation.dim % one == 0],
        default=min(MERGED_COLUMNS),
    )
    return DecodeLayout(
        span=span,
        pieces=row_bytes // span,
        box_rows=box_rows,
        boxes=schedule.keys // box_rows,
        stage_bytes=schedule.keys * row_bytes,
        scale_bytes=8 * schedule.keys if operation.scales == "token" else 0,
        stages=schedule.stages,
        merged_columns=merged,
        merged_bytes=merged * warp_column,
        sums_bytes=8 * schedule.warps * WARP_ROWS,
        parts_bytes=schedule.rows * operation.dim * 6 + 16 if schedule.cluster > 1 else 0,
        registers=_registers(operation, schedule),
        register_budget=register_budget(schedule),
    )


def register_budget(schedule: DecodeSchedule) -> int:
    """Registers that a thread may have: warps go to the quarters of a multiprocessor in turn."""
    warps = -(-schedule.ctas_per_sm * schedule.threads // 32 // PARTITIONS)
    return min(255, LANES // warps // 8 * 8)


def _registers(operation: DecodeOperation, schedule: DecodeSchedule) -> int:
    # Outputs in fp32, q in 16 bits, of 16 rows that a warp has.
    outputs, queries = operation.dim // 2, operation.dim // 4
    slices = -(-schedule.keys // (16 * schedule.key_warps))
    shared = CLUSTER_REGISTERS if schedule.cluster > 1 else 0
    return outputs + queries + slices * SLICE_REGISTERS + BASE_REGISTERS + shared

"""Shared memory and registers of a product with weights of few bits.

A stage has A's tile, in panels of 128 bytes of k, and the slabs of W's rows. All figures are bytes,
or 32-bit registers of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of, sums_squares
from warploom.generator.families._product.groups import table_bytes
from warploom.generator.families._product.layout import (
    ProductLayout,
    chunk,
    factor_bytes,
    store_box,
)
from warploom.generator.families.mixed_gemm.schedule import MixedGemmOperation, MixedGemmSchedule
from warploom.generator.slabs import DEPTH, SlabLayout
from warploom.generator.tensor_maps import operand_tile
from warploom.generator.wgmma import WARPGROUP

PANEL_BITS = 1024  # of k, in one row of a panel: TMA's widest span
LANES, PARTITIONS = 512, 4  # registers that a lane of a quarter of a multiprocessor shares out
MULTIPROCESSOR_BYTES, BLOCK_BYTES = 233_472, 1024  # shared memory, and what each block takes of it
MANY_FRAGMENTS = 32  # of a thread: half of its registers are sums
GROUP_STEPS = 4  # wgmma that are issued together, of one block of 64 rows
LOADING_REGISTERS = 40  # of the warpgroup that loads, where it leaves the rest to consumers
BASE_REGISTERS = 40  # for addresses, beside sums and what is decoded
PARTS_REGISTERS = 32  # of what adding parts takes beside an epilogue, as kernels compiled
RANGE_REGISTERS = 16  # of where parts of k are, beside what is decoded ahead, as kernels compiled
PART_RANGES, UNUSED = 24, 12  # likewise beside sums of a group by mma, and of the base there
FACTORS = 5  # addresses of rows' factors next to zeros of groups and a gate, from compiled kernels
WORDS, SCALES = 8, 4  # of a slab's codes of 4 bits, and of a group's scales, in 64 rows
BARRIER_BYTES = 16


@dataclass(frozen=True, slots=True)
class MixedGemmLayout(ProductLayout):
    """Where everything of one block lies."""

    slab: SlabLayout
    panels: int  # of A, in one stage
    slabs: int  # of W, in one stage: those of its rows, and of its k
    fragments: int  # of 64 rows by 8 columns, that a consumer has sums of
    group_steps: int  # wgmma of 64 rows that are issued together
    exchange_bytes: int  # of sums that sources leave for each other
    group_bytes: int  # of the table of groups of rows

    @property
    def trims_a(self) -> bool:
        """Whether tiles load no row of A past the last; those of groups load rows of the next."""
        return not self.group_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but the stages."""
        more = self.factor_bytes + self.group_bytes + BARRIER_BYTES
        return self.store_bytes + self.exchange_bytes + more


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def mixed_gemm_layout(
    operation: MixedGemmOperation, schedule: MixedGemmSchedule
) -> MixedGemmLayout:
    """Lay out a schedule, legal or not."""
    m, n, k = schedule.tile
    a = element(operation.a)
    blocks = max(1, schedule.row_blocks // max(1, schedule.sharing))
    fragments, steps = blocks * m // 8, _group_steps(operation, schedule, blocks)
    most = register_budget(schedule)
    sums = fragments * 4
    columns, finishing = chunk(operation, schedule, sums, most)
    if schedule.stream_k and operation.epilogue:  # parts are added with operands in registers
        finishing += PARTS_REGISTERS
    multiplying = sums + _decoding(operation, schedule, sums, blocks) + BASE_REGISTERS
    if schedule.sources > 1:  # each finishes some fragments of its own
        columns = 8
    elif schedule.store == "tma":  # stages need the room, and sums the registers
        columns = min(columns, 16 if fragments >= MANY_FRAGMENTS else 32)
    box = store_box(operation, schedule, columns)
    tile = operand_tile(a, k_major=True, extent=m, tile_k=PANEL_BITS // a.bits, blocks=1)
    slab, panels = operation.slab, k * a.bits // PANEL_BITS
    slabs = schedule.row_blocks * (k // DEPTH)
    return MixedGemmLayout(
        a=tile,
        stage_bytes=panels * tile.bytes + slabs * slab.bytes,
        chunk_columns=columns,
        store_box=box,
        store_span=box[0] * element(operation.d).bits // 8,
        stages=schedule.stages,
        consumers=schedule.consumers,
        sums_bytes=4 * m * n * schedule.warp_split_k,
        registers=max(multiplying, finishing),
        register_budget=most,
        parts_in_flight=4,
        reduced=schedule.split_k > 1,
        slab=slab,
        panels=panels,
        slabs=slabs,
        fragments=fragments,
        group_steps=steps,
        exchange_bytes=_exchanged(schedule, 16 * WARPGROUP * fragments),
        factor_bytes=factor_bytes(operation, schedule),
        group_bytes=table_bytes(2) if operation.groups == "rows" else 0,
    )


def register_budget(schedule: MixedGemmSchedule) -> int:
    """Registers that a consumer's thread may have: warps go to the quarters in turn."""
    if schedule.reallocates:
        launched = LANES // 3 // 8 * 8
        return (3 * launched - LOADING_REGISTERS) // 2 // 8 * 8
    warps = -(-schedule.ctas_per_sm * schedule.threads // 32 // PARTITIONS)
    return min(255, LANES // warps // 8 * 8)


def room(schedule: MixedGemmSchedule) -> int:
    """Shared memory that a block may have, as many as are to fit on a multiprocessor."""
    return MULTIPROCESSOR_BYTES // schedule.ctas_per_sm - BLOCK_BYTES


def _group_steps(operation: MixedGemmOperation, schedule: MixedGemmSchedule, blocks: int) -> int:
    """Steps of k that are multiplied together: within a group, and with few registers in work.

    What is decoded of int8 by channels has registers of its own in two of them that follow each
    other: a stage has two at least, since only what was issued before the last is waited for.
    """
    of_group = (operation.promoted or DEPTH) // operation.step
    if not operation.promoted and schedule.slabs <= schedule.warp_split_k:
        of_group = min(of_group, DEPTH // operation.step // 2)
    return of_group if schedule.lookahead else max(1, min(of_group, GROUP_STEPS // blocks))


def _exchanged(schedule: MixedGemmSchedule, sums: int) -> int:
    """Return what a block's consumers have of others' of as much as one has: every source's share.

    A share may be a part of a fragment, which four warps have.
    """
    return schedule.consumers * sums * (schedule.sources - 1) // schedule.sources


def _scales_rows_further(operation: MixedGemmOperation) -> bool:
    """Whether rows have prepared factors, and a gate or a mean of squares behind these."""
    steps = operation.epilogue
    further = gate_of(steps) is not None or sums_squares(steps)
    return further and any(step.prepared for step in steps)


def _decoding(
    operation: MixedGemmOperation, schedule: MixedGemmSchedule, sums: int, blocks: int
) -> int:
    """Registers of sums that are not promoted yet, and of what is decoded, or read, at a time."""
    promoted = schedule.scaled == "sums" and operation.promoted > 0
    if schedule.multiply == "mma":
        rows = schedule.tile[0] // 2  # of A, in two steps
        if not promoted:
            return rows
        several = schedule.slabs > schedule.warp_split_k  # of a stage: the next is read meanwhile
        more = blocks * (SCALES + 2 * WORDS * several) + PART_RANGES * schedule.stream_k
        if _scales_rows_further(operation) and operation.weight.has_zeros:
            more += FACTORS * (operation.group < DEPTH)
        return sums + 3 * rows + more - UNUSED
    words = (
        max(0, operation.weight.bits // 4 - 1) * WORDS
    )  # of a slab's codes, beyond those of 4 bits
    steps = blocks * _group_steps(operation, schedule, blocks)
    if schedule.lookahead:  # one bank, and the weights of two groups, or of more that are smaller
        ahead = 2 * max(steps, GROUP_STEPS) * 4 + blocks * words
        if operation.group and operation.scale == "fp32":  # of two groups, twice as wide
            ahead += 4 * blocks
        return sums + ahead + RANGE_REGISTERS * schedule.stream_k
    decoded = 2 * steps * 4 + blocks * words
    if not schedule.reallocates and (operation.group or blocks > 1):
        ranges = RANGE_REGISTERS if schedule.stream_k and blocks > 1 else 0
        decoded += blocks * WORDS + ranges  # else the base is enough
    groups = schedule.slabs // schedule.warp_split_k * (DEPTH // (operation.promoted or DEPTH))
    return (min(2, groups) * sums if promoted else 0) + decoded

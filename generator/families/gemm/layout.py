"""GEMM's shared memory and registers, derived from operation and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from warploom.generator.elements import ELEMENTS
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product.groups import table_bytes
from warploom.generator.families._product.layout import (
    WIDEST,
    ProductLayout,
    budget,
    chunk,
    factor_bytes,
    halved,
    store_box,
)
from warploom.generator.families.gemm.scales import column_scales, scale_bytes, scale_registers
from warploom.generator.families.gemm.schedule import (
    GemmOperation,
    GemmSchedule,
)
from warploom.generator.tensor_maps import OperandTile, operand_tile
from warploom.generator.wgmma import WARPGROUP, WGMMA_M

# Beside sums, a bank and scales in the loop over k, where no operand of the epilogue is loaded.
MAINLOOP_REGISTERS = 34
AHEAD_REGISTERS = 44  # the same beside two banks that take turns
# Columns of a chunk of a grouped GEMM: staging leaves room for a table beside the stages.
GROUPED_WIDEST = 32
# The ends of groups, and of rows the tiles before each, with one more of both in front.
GROUP_BYTES = {
    name: table_bytes(tables)
    for name, tables in (("none", 0), ("rows", 2), ("masked", 2), ("k", 1))
}
STREAM_REGISTERS = 8  # what of a range of k tiles is left, beside a bank
# The same of groups of rows, next to operands of the epilogue: for each block of 64 rows.
GROUPED_STREAM_REGISTERS = 28


@dataclass(frozen=True, slots=True)
class GemmLayout(ProductLayout):
    """Where everything of one block lies."""

    b: OperandTile
    scale_bytes: int  # of a stage, for block scales of single rows
    banks: int  # of promoted sums: blocks of 64 rows whose MMAs of a k tile may be in flight
    ahead: bool  # whether MMAs of a k tile run while those of the one before are scaled
    group_bytes: int  # of the table of groups

    @property
    def operand_bytes(self) -> int:
        """The block scales of all stages, and the table of groups."""
        return self.stages * self.scale_bytes + self.group_bytes

    @property
    def exchange(self) -> int:
        """K tiles in the time of which accumulators of a part of a tile are written and added.

        Of 128x256 it is 11 to 18 on an H200 (docs/notebook.md); that it is less for a tile that has
        fewer accumulators for each byte of a stage is not measured.
        """
        return 2 + 4 * self.sums_bytes // self.stage_bytes

    @property
    def trims_a(self) -> bool:
        """Whether tiles load no row of A past the last; those of groups load rows of the next."""
        return self.a.k_major and not self.group_bytes


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def gemm_layout(operation: GemmOperation, schedule: GemmSchedule) -> GemmLayout:
    """Lay out a schedule, legal or not."""
    m, n, k = schedule.tile
    cluster_m, cluster_n = schedule.cluster
    kind, most = ELEMENTS[operation.a], budget(schedule)
    scaled = operation.block_scales != "none"
    # Registers of a thread: for the sums of a tile's blocks of 64 rows that a consumer has, for a
    # bank of the sums of one block and k tile, and for block scales.
    blocks = schedule.rows // (WGMMA_M * schedule.sharing)
    each = WGMMA_M * schedule.columns // WARPGROUP
    sums, bank = blocks * each, each if operation.accumulation == "promoted" else 0
    scales = scale_registers(operation, schedule) if scaled else 0
    # A bank for each block where registers suffice; else all blocks take turns at one, which is for
    # two consumers that share a tile: MMAs of one run while the other adds up its own.
    banks = blocks if bank else 0
    grouped = operation.groups != "none"
    finishing = sums  # and what else is held while the epilogue's operands are
    if operation.by_rows and schedule.stream_k and operation.epilogue:
        finishing += GROUPED_STREAM_REGISTERS * blocks
    widest = GROUPED_WIDEST * halved(operation, schedule)[1] if grouped else WIDEST
    chunk_columns, registers = chunk(
        operation, schedule, finishing + banks * bank + scales, most, widest=widest
    )
    streamed = STREAM_REGISTERS * schedule.stream_k if bank else 0
    if registers + streamed > most and banks and schedule.sharing > 1:
        banks = 1
        chunk_columns, registers = chunk(operation, schedule, finishing, most, widest=widest)
        registers = max(registers, sums + bank + scales + MAINLOOP_REGISTERS)
    registers += streamed
    # A consumer with one block and a tile of its own scales one bank under the MMAs of the other.
    # Two that share a tile do so under each other's, and took up to 8 % longer with two banks each.
    needed = sums + 2 * bank + scales + AHEAD_REGISTERS + STREAM_REGISTERS * schedule.stream_k
    if scaled and column_scales(operation, schedule).each == 1:
        needed += schedule.columns // 4  # scales of a thread's columns
    if ahead := scaled and blocks == schedule.sharing == 1 and needed <= most:
        registers = max(registers, needed)
    box = store_box(operation, schedule, chunk_columns)
    # Sums of int32 at the limit spill, which those of fp32 do not.
    left = most - registers - kind.is_integer
    a_major, b_major = operation.layout_a == "row", operation.layout_b == "col"
    a = operand_tile(kind, k_major=a_major, extent=m, tile_k=k, blocks=cluster_n)
    b = operand_tile(
        ELEMENTS[operation.b],
        k_major=b_major,
        extent=n,
        tile_k=k,
        blocks=cluster_m,
        gated=gate_of(operation.epilogue) is not None,
    )
    return GemmLayout(
        a=a,
        b=b,
        stage_bytes=operation.pieces * a.bytes + operation.pieces_b * b.bytes,
        chunk_columns=chunk_columns,
        store_box=box,
        store_span=box[0] * ELEMENTS[operation.d].bits // 8,
        stages=schedule.stages,
        consumers=schedule.consumers,
        sums_bytes=4 * m * n,
        registers=registers,
        register_budget=most,
        parts_in_flight=16 if left >= 16 * 4 else 8,
        reduced=schedule.split_k > 1,
        scale_bytes=scale_bytes(operation, schedule) if scaled else 0,
        banks=banks,
        ahead=ahead,
        factor_bytes=factor_bytes(operation, schedule),
        group_bytes=GROUP_BYTES[operation.groups],
    )

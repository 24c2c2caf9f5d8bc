"""Block scales of a tile: which of them a warp copies and a thread reads for each k tile.

The products of a k tile are multiplied by a scale of their row of A and one of their column of B.
A warp copies them to shared memory of its own AHEAD k tiles before the products: of each 64 rows of
wgmma those of its 16 rows, and those of all columns; where a scale is of 128 rows of an operand,
one for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from warploom.generator.families.gemm.schedule import (
    SCALE_BLOCK,
    GemmOperation,
    GemmSchedule,
)
from warploom.generator.wgmma import WARPGROUP, WGMMA_M

MOST_BLOCKS = 2  # 128x128 blocks that the columns of one tile may lie in: a thread selects one
AHEAD = 3  # k tiles: about as long as memory takes where it is busy
WARP, WARP_ROWS = 32, 16  # threads; rows of wgmma that a warp has of 64
ALIGNMENT = 16  # of a warp's scales of a k tile: as many bytes are copied at once
BYTES = {"fp32": 4, "e8m0": 1}
CPP = {"fp32": "float", "e8m0": "uint8_t"}  # the element types of block scales


@dataclass(frozen=True, slots=True)
class SideScales:
    """The block scales of the operand on one side of wgmma, rows or columns.

    operand   a or b
    element   of the scales
    each      rows of the operand ([M, K] or [N, K]) that share one: 1 or 128
    count     that a thread reads for a k tile: of each 64 rows of wgmma, or of all columns
    of_warp   that a warp copies for a k tile, likewise
    """

    operand: Literal["a", "b"]
    element: str
    each: int
    count: int
    of_warp: int

    @property
    def bytes(self) -> int:
        """Of one scale."""
        return BYTES[self.element]

    @property
    def cpp(self) -> str:
        """The C++ type of the scales."""
        return CPP[self.element]

    @property
    def name(self) -> str:
        """What the scales are called among a kernel's parameters."""
        return f"{self.operand}_scales"

    @property
    def extent(self) -> str:
        """The parameter that says how many rows the operand has."""
        return "m" if self.operand == "a" else "n"


def row_scales(operation: GemmOperation, schedule: GemmSchedule) -> SideScales:
    """Those of the side of wgmma that has 64 rows; its blocks of 64 lie in one of 128 each."""
    operand: Literal["a", "b"] = "b" if schedule.swap_ab else "a"
    each = operation.scale_rows(operand)
    count, of_warp = (2, WARP_ROWS) if each == 1 else (1, 1)
    return SideScales(operand, _element(operation, operand), each, count, of_warp)


def column_scales(operation: GemmOperation, schedule: GemmSchedule) -> SideScales:
    """Those of wgmma's columns."""
    operand: Literal["a", "b"] = "a" if schedule.swap_ab else "b"
    each = operation.scale_rows(operand)
    columns = schedule.columns
    count, of_warp = columns // 4, columns
    if each > 1:  # a tile begins at any multiple of its columns
        latest = SCALE_BLOCK - gcd(columns, SCALE_BLOCK)
        count = of_warp = -(-(latest + columns) // SCALE_BLOCK)
    return SideScales(operand, _element(operation, operand), each, count, of_warp)


def scale_registers(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Registers of a thread for the products of block scales of a k tile."""
    rows, columns = row_scales(operation, schedule), column_scales(operation, schedule)
    blocks = schedule.rows // (WGMMA_M * schedule.sharing)
    return blocks * rows.count * columns.count


def scale_bytes(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Shared memory for the block scales of AHEAD k tiles and the one that is multiplied."""
    if operation.block_scales == "none":
        return 0
    rows, columns = row_scales(operation, schedule), column_scales(operation, schedule)
    blocks = schedule.rows // (WGMMA_M * schedule.sharing)
    size = columns.of_warp * columns.bytes
    size = -(-size // rows.bytes) * rows.bytes + blocks * rows.of_warp * rows.bytes
    warps = schedule.consumers * WARPGROUP // WARP
    return warps * (AHEAD + 1) * (-(-size // ALIGNMENT) * ALIGNMENT)


def blocks_reason(operation: GemmOperation, schedule: GemmSchedule) -> str | None:
    """Why the columns of a tile lie in too many blocks of scales; None where they do not."""
    columns = column_scales(operation, schedule)
    if columns.each <= 1 or columns.count <= MOST_BLOCKS:
        return None
    side = "m" if schedule.swap_ab else "n"
    return (
        f"tile {side} {schedule.columns} with block_scales {operation.block_scales}: lies in "
        f"{columns.count} blocks of 128, and must lie in at most {MOST_BLOCKS}"
    )


def _element(operation: GemmOperation, operand: Literal["a", "b"]) -> str:
    return operation.block_scale_a if operand == "a" else operation.block_scale_b

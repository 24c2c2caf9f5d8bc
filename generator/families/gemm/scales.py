"""Block scales of a tile: which of them a consumer's thread reads for each k tile.

The products of a k tile are multiplied by a scale of their row of A and one of their column of B.
A thread reads them from memory two k tiles ahead of the products: of each 64 rows of wgmma its own
two, of the columns one of every 32, which the threads of a warp exchange under the products; where
a scale is of 128 rows of an operand, one for all of them.
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
from warploom.generator.wgmma import WGMMA_M

MOST_BLOCKS = 2  # 128x128 blocks that the columns of one tile may lie in: a thread selects one
ADDRESSES = 2  # registers of a pointer
CPP = {"fp32": "float", "e8m0": "uint8_t"}  # the element types of block scales


@dataclass(frozen=True, slots=True)
class SideScales:
    """The block scales of the operand on one side of wgmma, rows or columns.

    operand   a or b
    element   of the scales
    each      rows of the operand ([M, K] or [N, K]) that share one: 1 or 128
    count     that a thread reads for a k tile: of each 64 rows of wgmma, or of all columns
    """

    operand: Literal["a", "b"]
    element: str
    each: int
    count: int

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
    operand: Literal["a", "b"] = "b" if schedule.swap else "a"
    each = operation.scale_rows(operand)
    return SideScales(operand, _element(operation, operand), each, 2 if each == 1 else 1)


def column_scales(operation: GemmOperation, schedule: GemmSchedule) -> SideScales:
    """Those of wgmma's columns."""
    operand: Literal["a", "b"] = "a" if schedule.swap else "b"
    each = operation.scale_rows(operand)
    columns = schedule.columns
    count = -(-columns // 32)
    if each > 1:  # a tile begins at any multiple of its columns
        latest = SCALE_BLOCK - gcd(columns, SCALE_BLOCK)
        count = -(-(latest + columns) // SCALE_BLOCK)
    return SideScales(operand, _element(operation, operand), each, count)


def scale_registers(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Registers of a thread for block scales: those in use, those of two k tiles, and addresses."""
    rows, columns = row_scales(operation, schedule), column_scales(operation, schedule)
    blocks = schedule.rows // (WGMMA_M * schedule.sharing)
    pointers = blocks * rows.count + (1 if columns.each == 1 else columns.count)
    exchanged = schedule.columns // 4 if columns.each == 1 else 0
    return 3 * blocks * rows.count + 2 * columns.count + exchanged + ADDRESSES * pointers


def blocks_reason(operation: GemmOperation, schedule: GemmSchedule) -> str | None:
    """Why the columns of a tile lie in too many blocks of scales; None where they do not."""
    columns = column_scales(operation, schedule)
    if columns.each <= 1 or columns.count <= MOST_BLOCKS:
        return None
    side = "m" if schedule.swap else "n"
    return (
        f"tile {side} {schedule.columns} with block_scales {operation.block_scales}: lies in "
        f"{columns.count} blocks of 128, and must lie in at most {MOST_BLOCKS}"
    )


def _element(operation: GemmOperation, operand: Literal["a", "b"]) -> str:
    return operation.block_scale_a if operand == "a" else operation.block_scale_b

"""Block scales of a tile: which of them a stage has and a thread reads for each k tile.

Scales of single rows of an operand come to shared memory beside the operands of their stage, by
TMA where they lie side by side, and else by warps of the producer. Of blocks of 128 rows a tile
has one or two, which a thread reads by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from warploom.generator.epilogue import gate_of
from warploom.generator.families.gemm.schedule import (
    SCALE_BLOCK,
    GemmOperation,
    GemmSchedule,
)
from warploom.generator.wgmma import WGMMA_M

MOST_BLOCKS = 2  # 128x128 blocks that the columns of one tile may lie in: a thread selects one
ALIGNMENT = 16  # of those of rows, and of those of columns
BYTES = {"fp32": 4, "e8m0": 1}
CPP = {"fp32": "float", "e8m0": "uint8_t"}  # the element types of block scales


@dataclass(frozen=True, slots=True)
class SideScales:
    """The block scales of the operand on one side of wgmma, rows or columns.

    operand   a or b
    element   of the scales
    each      rows of the operand ([M, K] or [N, K]) that share one: 1 or 128
    count     that a thread reads for a k tile: of each 64 rows of wgmma, or of all columns
    of_tile   that a tile has
    spare     more of a stage: a copy begins at a multiple of 16 bytes, and groups at any row
    factor_columns  of wgmma that share a scale wherever a tile begins; 1 for those of rows
    halves    whether the operand is [gate; up]: 8 rows of the gate and 8 of up are in turn in a
              tile, and a thread reads the scale of either
    """

    operand: Literal["a", "b"]
    element: str
    each: int
    count: int
    of_tile: int
    spare: int = 0
    factor_columns: int = 1
    halves: bool = False

    @property
    def element_bytes(self) -> int:
        """Of one scale."""
        return BYTES[self.element]

    @property
    def bytes(self) -> int:
        """Of all in a stage."""
        return -(-(self.of_tile + self.spare) * self.element_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def aligned(self) -> int:
        """Scales in 16 bytes: copies begin at multiples of as many."""
        return ALIGNMENT // self.element_bytes

    @property
    def rows_of_block(self) -> int:
        """Rows of the operand that lie in a block: of each half 128, which are in turn."""
        return self.each * (1 + self.halves)

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
    count, of_tile = (2, schedule.rows) if each == 1 else (1, 0)
    if _in_halves(operation, operand):  # of rows r and r + 8
        count = 2
    return _side(operation, operand, count, of_tile)


def column_scales(operation: GemmOperation, schedule: GemmSchedule) -> SideScales:
    """Those of wgmma's columns."""
    operand: Literal["a", "b"] = "a" if schedule.swap_ab else "b"
    each = operation.scale_rows(operand)
    columns = schedule.columns
    count, of_tile, factor_columns = columns // 4, columns, 1
    if each > 1:  # a tile begins at any multiple of its columns
        factor_columns = gcd(columns, SCALE_BLOCK)
        latest = SCALE_BLOCK - factor_columns
        count, of_tile = -(-(latest + columns) // SCALE_BLOCK), 0
    if _in_halves(operation, operand):
        count, factor_columns = 2, 8
    return _side(operation, operand, count, of_tile, factor_columns)


def staged_scales(
    operation: GemmOperation, schedule: GemmSchedule
) -> list[tuple[SideScales, Literal["rows", "columns"]]]:
    """The sides whose scales come to shared memory with a stage; what they are called there."""
    if operation.block_scales == "none":
        return []
    sides: list[tuple[SideScales, Literal["rows", "columns"]]] = [
        (row_scales(operation, schedule), "rows"),
        (column_scales(operation, schedule), "columns"),
    ]
    return [(side, name) for side, name in sides if side.each == 1]


def scale_registers(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Registers of a thread for block scales of a k tile: those of rows, times those of blocks of
    columns; scales of single columns are read where they are used, while rows' exponents and what
    is made of them are both held.
    """
    rows, columns = row_scales(operation, schedule), column_scales(operation, schedule)
    held = schedule.rows // (WGMMA_M * schedule.sharing) * rows.count
    if columns.each == 1:
        return held * (2 if rows.element == "e8m0" else 1)
    if columns.halves:  # the factors of 64 rows are made where these are scaled
        return held + columns.count
    return held * schedule.columns // columns.factor_columns


def scale_bytes(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Shared memory of a stage for block scales."""
    return sum(side.bytes for side, _ in staged_scales(operation, schedule))


def blocks_reason(operation: GemmOperation, schedule: GemmSchedule) -> str | None:
    """Why the columns of a tile lie in too many blocks of scales; None where they do not."""
    columns = column_scales(operation, schedule)
    side = "m" if schedule.swap_ab else "n"
    if columns.halves and SCALE_BLOCK % schedule.columns:
        return (
            f"tile {side} {schedule.columns} with block_scales {operation.block_scales} and a gate "
            f"in halves: must divide {SCALE_BLOCK}, so that what a tile has of either half lies in "
            "one block"
        )
    if columns.each <= 1 or columns.halves or columns.count <= MOST_BLOCKS:
        return None
    return (
        f"tile {side} {schedule.columns} with block_scales {operation.block_scales}: lies in "
        f"{columns.count} blocks of 128, and must lie in at most {MOST_BLOCKS}"
    )


def _in_halves(operation: GemmOperation, operand: Literal["a", "b"]) -> bool:
    """Whether an operand with blocks of scales is [gate; up]."""
    gate = gate_of(operation.epilogue)
    return operand == "b" and gate is not None and gate.layout == "halves"


def _side(
    operation: GemmOperation,
    operand: Literal["a", "b"],
    count: int,
    of_tile: int,
    factor_columns: int = 1,
) -> SideScales:
    element = operation.block_scale_a if operand == "a" else operation.block_scale_b
    spare = ALIGNMENT // BYTES[element] if operation.by_rows and of_tile else 0
    each, halves = operation.scale_rows(operand), _in_halves(operation, operand)
    return SideScales(operand, element, each, count, of_tile, spare, factor_columns, halves)

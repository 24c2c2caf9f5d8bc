"""GEMM's shared memory and registers, derived from operation and schedule.

D is finished by chunks: 64 rows of as many columns as staging rows (their span) and registers
allow. All figures are bytes, or 32-bit registers of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.elements import element
from warploom.generator.families.gemm.schedule import (
    WARPGROUP,
    WGMMA_M,
    GemmOperation,
    GemmSchedule,
)
from warploom.generator.tensor_maps import SPANS, OperandTile, operand_tile

STORE_BUFFERS = 2  # staging buffers per consumer: one being filled, one being stored
PRODUCER_REGISTERS = 40  # with two consumers: 40 + 2 * 232 is the 504 that 384 threads may hold
CONSUMER_REGISTERS = {1: 255, 2: 232}
# Beside accumulators and the operands of a chunk, fitted to what a few hundred specs compiled to:
# addressing takes so many registers, and each fragment in work so many more.
BASE_REGISTERS = {"tma": 40, "direct": 56}
FRAGMENT_REGISTERS = {"tma": 5, "direct": 9}


@dataclass(frozen=True, slots=True)
class GemmLayout:
    """Where everything of one block lies."""

    a: OperandTile
    b: OperandTile
    chunk_columns: int  # columns of D that are finished, staged and stored at a time
    store_span: int  # bytes of a row of the staging buffers, 64 rows tall; 0: none
    stages: int
    consumers: int
    registers: int  # that a consumer's thread is expected to need

    @property
    def register_budget(self) -> int:
        """Registers that a consumer's thread may have."""
        return CONSUMER_REGISTERS[self.consumers]

    @property
    def stage_bytes(self) -> int:
        """Operand bytes of one stage: what its full barrier expects."""
        return self.a.bytes + self.b.bytes

    @property
    def store_bytes(self) -> int:
        """All staging buffers of D."""
        return self.consumers * STORE_BUFFERS * WGMMA_M * self.store_span

    @property
    def fixed_bytes(self) -> int:
        """Everything but the stages, with room to align the base to 1024."""
        return -(-self.store_bytes // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch: stages, staging, a pair of barriers a stage."""
        stages = self.stages * (self.stage_bytes + 2 * 8)
        return -(-(self.fixed_bytes + stages) // 1024) * 1024


def gemm_layout(operation: GemmOperation, schedule: GemmSchedule) -> GemmLayout:
    """Lay out a schedule, legal or not."""
    m, n, k = schedule.tile
    cluster_m, cluster_n = schedule.cluster
    span, registers = _chunk(operation, schedule)
    return GemmLayout(
        a=operand_tile(
            element(operation.a),
            k_major=operation.layout_a == "row",
            extent=m,
            tile_k=k,
            slices=cluster_n,
        ),
        b=operand_tile(
            element(operation.b),
            k_major=operation.layout_b == "col",
            extent=n,
            tile_k=k,
            slices=cluster_m,
        ),
        chunk_columns=span * 8 // element(operation.d).bits,
        store_span=span if schedule.store == "tma" else 0,
        stages=schedule.stages,
        consumers=schedule.consumers,
        registers=registers,
    )


def _chunk(operation: GemmOperation, schedule: GemmSchedule) -> tuple[int, int]:
    """The span of a chunk's rows, the widest with which registers suffice, and those registers."""
    bits = element(operation.d).bits
    span, registers = bits, 0  # 8 columns, one fragment, at the least
    for span in (
        span for span in SPANS if span >= bits and schedule.tile[1] * bits % (span * 8) == 0
    ):
        registers = _registers(operation, schedule, span // bits)
        if registers <= CONSUMER_REGISTERS[schedule.consumers]:
            break
    return span, registers


def _registers(operation: GemmOperation, schedule: GemmSchedule, fragments: int) -> int:
    m, n, _ = schedule.tile
    accumulators = m * n // (WARPGROUP * schedule.sharing)
    paired = schedule.store == "tma"
    operands = sum(step.registers(paired=paired) for step in operation.epilogue)
    work = operands + FRAGMENT_REGISTERS[schedule.store] if operation.epilogue else 0
    return accumulators + fragments * work + BASE_REGISTERS[schedule.store]

"""Shared memory and registers of a product, as far as operands decide nothing of them.

D is finished by chunks: 64 rows of as many columns as staging rows (their span) and registers
allow. All figures are bytes, or 32-bit registers of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.elements import ELEMENTS
from warploom.generator.epilogue import (
    GROUP,
    EpilogueStep,
    factors,
    gate_of,
    quantizes,
    rounds_stochastically,
    sums_squares,
)
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.tensor_maps import SPANS, OperandTile
from warploom.generator.wgmma import WARPGROUP, WGMMA_M

WIDEST = 64  # columns of a chunk
REDUCED_COLUMNS = 16  # of a chunk of the second launch, where the store takes as few
STORE_BUFFERS = 2  # staging buffers per consumer: one being filled, one being stored
REGISTERS = {1: 255, 2: 168}  # that a thread is launched with, by the number of consumers
# Beside accumulators and the operands of a chunk, fitted to what a few hundred specs compiled to:
# addressing takes so many registers, and each fragment in work so many more.
BASE_REGISTERS = {"tma": 40, "direct": 56}
FRAGMENT_REGISTERS = {"tma": 5, "direct": 9}
SQUARE_REGISTERS = 8  # of sums of squares of a group, and of where they are stored
QUANTIZE_REGISTERS = 40  # of direct stores, whose addresses are kept from pass to pass
# A state, random words and what they are made of, by the bits of D (whose type may be refused).
ROUNDING_REGISTERS = {32: 24, 16: 24, 8: 32}
# What the gradient of a gate is made of, and where it is stored: pairs of elements, or single ones.
GATE_GRADIENT_REGISTERS = {True: 24, False: 84}
GATE_REGISTERS = 8  # what a gate is multiplied by, and where that lies in the product
PLACE_REGISTERS = 8  # where a step before a gate stores both halves, beside a D of 32 bits
CUT_REGISTERS = 4  # of a gated tile whose k is cut; twice where a step stores both halves


@dataclass(frozen=True, slots=True)
class ProductLayout:
    """Where A's tiles, D's staging and the sums of one block lie."""

    a: OperandTile
    stage_bytes: int  # operands of one stage: what its full barrier expects
    chunk_columns: int  # of wgmma, that are finished, staged and stored at a time
    store_box: tuple[int, int]  # columns and rows of D in a staging buffer; (0, 0): none
    store_span: int  # bytes of a row of the staging buffers
    stages: int
    consumers: int
    sums_bytes: int  # accumulators of a tile
    registers: int  # that a consumer's thread is expected to need
    register_budget: int  # that it may have
    parts_in_flight: int  # fragments of a part, 4 registers each, that a thread reads at a time
    reduced: bool  # a second launch finishes D: see launch.py
    factor_bytes: int  # of rows, that a step has computed before its tile; 0: none does

    @property
    def trims_a(self) -> bool:
        """Whether tiles load no row of A past the last: their boxes have a row for each of A's."""
        return self.a.k_major

    @property
    def store_bytes(self) -> int:
        """All staging buffers of D; none where a second launch finishes it."""
        return 0 if self.reduced else self.consumers * self.staging_bytes

    @property
    def kept_factor_bytes(self) -> int:
        """Factors of the rows of all consumers; none where a second launch finishes D."""
        return 0 if self.reduced else self.factor_bytes

    @property
    def reduction_bytes(self) -> int:
        """Dynamic shared memory of a block of the second launch, which is one warpgroup."""
        return -(-(self.staging_bytes + self.factor_bytes) // 1024) * 1024

    @property
    def staging_bytes(self) -> int:
        """Staging buffers of one consumer."""
        return STORE_BUFFERS * self.store_box[1] * self.store_span

    @property
    def rows_of_thread(self) -> int:
        """Rows of a staging buffer of which a thread stores 16 bytes, where 128 do so at once."""
        return max(1, self.store_box[1] * self.store_span // (16 * WARPGROUP))

    @property
    def operand_bytes(self) -> int:
        """What a family has of its operands outside of the stages."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """Everything but the stages, with room to align the base to 1024."""
        return -(-self.store_bytes // 1024) * 1024 + self.operand_bytes + self.kept_factor_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch: stages, staging, a pair of barriers a stage."""
        stages = self.stages * (self.stage_bytes + 2 * 8)
        return -(-(self.fixed_bytes + stages) // 1024) * 1024


def halved(operation: ProductOperation, schedule: ProductSchedule) -> tuple[int, int]:
    """What rows and columns of wgmma are divided by, of those of the product, to be D's.

    A gate and what it multiplies are 8 rows of wgmma apart where these are n, else 8 columns.
    """
    if gate_of(operation.epilogue) is None:
        return 1, 1
    return (2, 1) if schedule.swap_ab else (1, 2)


def store_box(
    operation: ProductOperation, schedule: ProductSchedule, chunk_columns: int
) -> tuple[int, int]:
    """Columns and rows of D in a staging buffer; (0, 0) where there is none."""
    if schedule.store != "tma":
        return 0, 0
    rows, columns = halved(operation, schedule)
    sides = WGMMA_M // rows, chunk_columns // columns
    return sides if schedule.swap_ab else (sides[1], sides[0])


def preparing(schedule: ProductSchedule) -> int:
    """Consumers that prepare factors of the same rows of D together."""
    together = schedule.swap_ab and schedule.kernel_schedule == "cooperative"
    return schedule.consumers if together else 1


def factor_bytes(operation: ProductOperation, schedule: ProductSchedule) -> int:
    """Shared memory of the factors of all consumers' rows; 0 where no step prepares any."""
    if not any(step.prepared for step in operation.epilogue):
        return 0
    rows = schedule.columns if schedule.swap_ab else schedule.rows // max(1, schedule.sharing)
    return 4 * rows * schedule.consumers // preparing(schedule)


def budget(schedule: ProductSchedule) -> int:
    """Registers of a consumer's thread: two consumers take what the producer leaves of all."""
    launched = REGISTERS[schedule.consumers]
    return (
        (3 * launched - schedule.producer_registers) // 2 if schedule.consumers == 2 else launched
    )


def chunk(
    operation: ProductOperation,
    schedule: ProductSchedule,
    accumulators: int,
    most: int,
    *,
    widest: int = WIDEST,
) -> tuple[int, int]:
    """Columns of a chunk, up to `widest` and the most with which `most` registers suffice beside a
    thread's `accumulators`, and the registers that these and the chunk take.

    Where a second launch finishes the tile, it has narrow chunks, and sums leave as they are.
    """
    if schedule.split_k > 1:
        widths = chunks(operation, schedule) or [8]
        wide = [width for width in widths if width >= REDUCED_COLUMNS]
        return min(wide, default=widths[0]), accumulators + BASE_REGISTERS["tma"]
    columns, registers = 0, 0
    widths = chunks(operation, schedule) or [8]
    for columns in [width for width in widths if width <= widest] or widths[-1:]:
        registers = accumulators + _registers(operation, schedule, columns // 8)
        if registers <= most:
            break
    return columns, registers


def chunks(operation: ProductOperation, schedule: ProductSchedule) -> list[int]:
    """The widths that a chunk may have, the widest first; none where D cannot be staged.

    A row of D's in a staging buffer is one of TMA's spans, and as wide as the chunk; swapped, it
    is 64 elements long, and the width is the number of rows: 16 for what one stmatrix turns.
    """
    widths = [64, 32, 16, 8]
    if schedule.store == "tma":
        bits = ELEMENTS[operation.d].bits
        spans = [8 * span // bits for span in SPANS if span >= bits]
        widths = [64, 32, 16] if schedule.swap_ab else spans
    finished = schedule.finished
    columns = halved(operation, schedule)[1] if operation.epilogue else 1
    least = GROUP if sums_squares(operation.epilogue) and not schedule.swap_ab else 8
    return [
        width * columns for width in widths if finished % (width * columns) == 0 and width >= least
    ]


def in_pairs(operation: ProductOperation, schedule: ProductSchedule) -> bool:
    """Whether steps read and store two neighbours of a row as one word.

    Swapped, a thread has no neighbours, nor has it before a gate that is interleaved with up.
    """
    gate = gate_of(operation.epilogue)
    interleaved = gate is not None and gate.layout == "interleaved"
    return schedule.store == "tma" and not schedule.swap_ab and not interleaved


def _registers(operation: ProductOperation, schedule: ProductSchedule, fragments: int) -> int:
    steps = operation.epilogue
    if not steps:
        return BASE_REGISTERS[
            "tma" if schedule.store == "tma" and not schedule.swap_ab else "direct"
        ]
    pairs, (_, columns) = in_pairs(operation, schedule), halved(operation, schedule)
    operands = sum(
        step.registers(paired=pairs) * min(columns, factors(steps, index))
        for index, step in enumerate(steps)
        if held(step, schedule) != "block"
    )
    way = "tma" if pairs else "direct"
    gated = GATE_REGISTERS if columns > 1 else 0
    if gated:
        stored = [step for index, step in enumerate(steps) if factors(steps, index) > 1]
        if ELEMENTS[operation.d].bits == 32:
            gated += PLACE_REGISTERS * sum(step.auxiliary for step in stored)
        gated += CUT_REGISTERS * schedule.stream_k * (1 + any(step.auxiliary for step in stored))
    if schedule.store == "direct" and quantizes(steps):  # single elements of whole blocks
        gated += QUANTIZE_REGISTERS
    if sums_squares(steps):
        gated += SQUARE_REGISTERS
    if rounds_stochastically(steps):
        gated += ROUNDING_REGISTERS[ELEMENTS[operation.d].bits]
    if any(step.loads for step in steps):
        gated += GATE_GRADIENT_REGISTERS[pairs] + 2 * CUT_REGISTERS * schedule.stream_k
    return fragments // columns * (operands + FRAGMENT_REGISTERS[way]) + BASE_REGISTERS[way] + gated


def held(step: EpilogueStep, schedule: ProductSchedule) -> str:
    """For how long a thread holds what a step reads: one `block` of 64 rows of wgmma, in which its
    rows stay the same, or one `fragment`; or `nothing`. A step with an output gets the `place`.
    """
    if step.loads:
        return "fragment"
    if step.prepared:
        return "fragment" if schedule.swap_ab else "block"
    if step.auxiliary or step.reads == "nothing":
        return "place" if step.auxiliary else "nothing"
    return "block" if step.reads == ("column" if schedule.swap_ab else "row") else "fragment"

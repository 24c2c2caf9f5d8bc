"""Which operations and schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.sparse_gemm.layout import SparseGemmLayout
from warploom.generator.families.sparse_gemm.schedule import (
    SparseGemmOperation,
    SparseGemmSchedule,
)


def operation_reasons(operation: SparseGemmOperation) -> list[str]:
    """Why there is no such operation; empty when there is."""
    wide = operation.element in ("bf16", "fp16")
    element, output = operation.element, operation.output
    return rules.broken(
        (
            f"output {output}: must be like_x where x has 16 bits, as {element} has"
            if wide and output != "like_x"
            else None,
            f"output like_x: must be bf16 or fp16 where x has 8 bits, as {element} has"
            if not wide and output == "like_x"
            else None,
            f"scaled: must be false where x has 16 bits, as {element} has"
            if wide and operation.scaled
            else None,
        )
    )


def schedule_reasons(
    arch: Architecture, operation: SparseGemmOperation, schedule: SparseGemmSchedule
) -> list[str]:
    """Why the schedule does not fit; empty when it does."""
    layout = SparseGemmLayout(operation, schedule)
    too_tall = f"{schedule.rows} rows of the weight in a tile: a box has at most 256"
    return rules.broken(
        (
            too_tall if schedule.rows > 256 else None,
            rules.fits_shared(layout.shared_bytes, arch),
            rules.fits_registers(layout.registers, schedule.consumer_registers),
        )
    )

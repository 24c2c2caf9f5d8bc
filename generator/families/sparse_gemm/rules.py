"""Which schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.sparse_gemm.layout import SparseGemmLayout
from warploom.generator.families.sparse_gemm.schedule import (
    SparseGemmOperation,
    SparseGemmSchedule,
)


def schedule_reasons(
    arch: Architecture, operation: SparseGemmOperation, schedule: SparseGemmSchedule
) -> list[str]:
    """Why the schedule does not fit; empty when it does."""
    layout = SparseGemmLayout(schedule)
    too_tall = f"{schedule.rows} rows of the weight in a tile: a box has at most 256"
    return rules.broken(
        (
            too_tall if schedule.rows > 256 else None,
            rules.fits_shared(layout.shared_bytes, arch),
            rules.fits_registers(layout.registers, schedule.consumer_registers),
        )
    )

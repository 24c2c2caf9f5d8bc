"""What the GEMM template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._product import template
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families.gemm.header import described, summary
from warploom.generator.families.gemm.launch import LIST_THREADS, ROWS_END
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.families.gemm.scales import column_scales, row_scales, staged_scales
from warploom.generator.families.gemm.schedule import (
    SPARSE_BLOCK,
    GemmOperation,
    GemmSchedule,
    GemmSpec,
)
from warploom.generator.wgmma import wgmma


def context(spec: GemmSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = gemm_layout(operation, schedule)
    row_side, column_side = ("b", "a") if schedule.swap_ab else ("a", "b")
    majors = {"a": layout.a.k_major, "b": layout.b.k_major}
    scaled, listed = operation.block_scales != "none", operation.sparse != "none"
    return {
        **template.context(operation, schedule, layout),
        "scaled": scaled,
        "pieces": operation.pieces,
        "pieces_b": operation.pieces_b,
        "wgmma_bits": element(operation.a).bits,
        "listed": listed,
        "paired": operation.sparse == "d" and schedule.cluster_size > 1,
        "varied": listed or operation.groups == "k",  # whether tiles differ in their k tiles
        "groups": "rows" if operation.by_rows else operation.groups,
        "most_groups": MOST_GROUPS,
        "rows_end": f"1 << {ROWS_END.bit_length() - 1}",
        "sparse_block": SPARSE_BLOCK,
        "list_threads": LIST_THREADS,
        "products": "ahead" if layout.ahead else "scaled" if scaled else operation.accumulation,
        "row_scales": row_scales(operation, schedule),
        "column_scales": column_scales(operation, schedule),
        "staged_scales": staged_scales(operation, schedule),
        "wgmma": wgmma(
            element(getattr(operation, row_side)),
            element(getattr(operation, column_side)),
            schedule.columns,
            a_k_major=majors[row_side],
            b_k_major=majors[column_side],
        ),
        "order": _order(operation, schedule),
        "summary": summary(spec),
        "header": described(spec, layout, _order(operation, schedule)),
    }


def _order(operation: GemmOperation, schedule: GemmSchedule) -> str:
    """The part that keeps the consumers in step."""
    # Scales take less time between MMAs than waiting for a turn would.
    scaled = operation.block_scales != "none"
    shared = schedule.sharing == 2 and operation.accumulation == "promoted" and not scaled
    return "staggered" if shared else schedule.kernel_schedule

"""What the template of a GEMM is rendered with: its options, and the words of these."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._product import template
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families._product.operand import Operand
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
    """What this family's template is rendered with, in addition to what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = gemm_layout(operation, schedule)
    row_side, column_side = ("b", "a") if schedule.swap_ab else ("a", "b")
    majors = {"a": layout.a.k_major, "b": layout.b.k_major}
    scaled, listed = operation.block_scales != "none", operation.sparse != "none"
    groups = "rows" if operation.by_rows else operation.groups
    split = schedule.cluster_split_k > 1
    order = _order(operation, schedule)
    shared = template.context(operation, schedule, layout, groups=groups)
    paired = operation.sparse == "d" and schedule.cluster_size > 1
    a = Operand(operation, schedule, layout.a, "m", groups, layout.trims_a, paired)
    whole_k = groups == "k" and layout.a.k_major
    main_loop = "ahead" if layout.ahead else "scaled" if scaled else "plain"
    applies = {
        "groups_of_k": groups == "k",
        "whole_k": whole_k,
        "bounded_k": groups == "k" and not whole_k,
        "listed": listed,
        "listed_d": operation.sparse == "d",
        "listed_k": listed and operation.sparse != "d",
        "split": split,
        "block_scaled": scaled,
        f"main_loop_{main_loop}": True,
        order: order != "cooperative",
    }
    return {
        **shared,
        "parts": [
            *shared["parts"],
            *(f"gemm/{name}.cuh.jinja" for name, has in applies.items() if has),
        ],
        "scaled": scaled,
        "split": split,
        "stream_k": schedule.stream_k,
        "exchange": layout.exchange,
        "units": "shared" if schedule.stream_k else "parts" if schedule.split_k > 1 else "whole",
        # Of the CTA whose tile it is; and all k tiles that a CTA multiplies.
        "tile_rank": "0" if split else "rank",
        "k_tiles": "(p.k + kTileK * kSplit - 1) / (kTileK * kSplit)"
        if split
        else "(p.k + kTileK - 1) / kTileK",
        "accumulators": "total.accumulators" if split else "mainloop.accumulators",
        "added_with": "p, at, shared.scales[previous], shared.empty[previous]"
        + ", rank" * schedule.along_both,
        "releases": _releases(schedule),
        "scheduler": _scheduler(listed=listed, grouped=groups != "none"),
        "scheduler_parts": _scheduler_parts(schedule, groups, listed=listed),
        "sums_parts": _sums_parts(schedule),
        "pieces": operation.pieces,
        "pieces_b": operation.pieces_b,
        "wgmma_bits": element(operation.a).bits,
        "listed": listed,
        "paired": paired,
        "operands": (a, Operand(operation, schedule, layout.b, "n", groups)),
        "whole_k": whole_k,
        "varied": listed or operation.groups == "k",  # whether tiles differ in their k tiles
        "most_groups": MOST_GROUPS,
        "rows_end": f"1 << {ROWS_END.bit_length() - 1}",
        "sparse_block": SPARSE_BLOCK,
        "list_threads": LIST_THREADS,
        "products": operation.accumulation if main_loop == "plain" else main_loop,
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
        "order": order,
        "summary": summary(spec),
        "header": described(spec, layout, order),
    }


def _order(operation: GemmOperation, schedule: GemmSchedule) -> str:
    """The part that keeps the consumers in step."""
    # Scales take less time between MMAs than waiting for a turn would.
    scaled = operation.block_scales != "none"
    shared = schedule.sharing == 2 and operation.accumulation == "promoted" and not scaled
    return "staggered" if shared else schedule.kernel_schedule


def _releases(schedule: GemmSchedule) -> str:
    """C++ that multiplies the consumers of a CTA: whose releases an empty barrier waits for."""
    if schedule.cluster_split_k > 1:
        return ""
    return f" * {'(kClusterM + kClusterN - 1)' if schedule.along_both else 'kClusterSize'}"


def _scheduler(*, listed: bool, grouped: bool) -> str:
    """The declaration of the tile scheduler."""
    if listed:
        return "ListedTiles tiles(p)"
    return "GroupedTiles tiles(p, shared.groups)" if grouped else "Tiles tiles(p)"


def _scheduler_parts(schedule: GemmSchedule, groups: str, *, listed: bool) -> list[str]:
    """The files of a tile scheduler that does not simply take whole tiles of D in turn."""
    if schedule.split_k > 1:
        return ["_product/walk_parts.cuh"]
    if listed:
        return ["gemm/listed_tiles.cuh.jinja"]
    walk = ["_product/walk.cuh.jinja"] * schedule.stream_k
    files = {"rows": "_product/grouped_rows.cuh.jinja", "k": "gemm/grouped_k.cuh.jinja"}
    return walk + ([files[groups]] if groups != "none" else [])


def _sums_parts(schedule: GemmSchedule) -> list[str]:
    """The files by which several CTAs add up the accumulators of a tile, in the order of use."""
    split = schedule.cluster_split_k > 1
    parts = ["_product/split_sums.cuh.jinja"] * split
    if schedule.stream_k:
        parts.append("_product/parts.cuh.jinja")
    elif schedule.split_k > 1:
        parts.append("_product/partial_tiles.cuh.jinja")
    return ["_product/accumulator_fragment.cuh", *parts] if parts else []

"""What the backward template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._attention import template as modifiers
from warploom.generator.families.attention_backward.header import described
from warploom.generator.families.attention_backward.launch import ROW_THREADS
from warploom.generator.families.attention_backward.layout import (
    CROWDED_CAPS,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.schedule import AttentionBackwardSpec
from warploom.generator.wgmma import WGMMA_M, wgmma

MOST_FUSED = 96  # rows of q
WIDEST = 256
# From this size on lse is too coarse for weights exp(score - lse), which are divided by their sum
# then. fp32 numbers just below it are 2^-11 apart: weights are off by at most 2^-12, less than the
# rounding of a weight to 16 bits.
COARSE_LSE = 4096
# What tiles of v and do, and dv, are called where their head dimension is that of k, and where not.
_LIKE = {
    "value_tile": "Tile",
    "value_span": "kSpan",
    "value_gradients": "kGradients",
    "value_offset": "columns",
    "v_bytes": "kKvBytes",
    "do_bytes": "kQBytes",
    "multiply_dv": "multiply_gradient",
    "stage_dv": "stage",
    "store_dv": "store",
    "own_v": "own",
}
_UNLIKE = {
    "value_tile": "ValueTile",
    "value_span": "kValueSpan",
    "value_gradients": "kValueGradients",
    "value_offset": "value_columns",
    "v_bytes": "kVBytes",
    "do_bytes": "kDoBytes",
    "multiply_dv": "multiply_dv",
    "stage_dv": "stage_dv",
    "store_dv": "store_dv",
    "own_v": "own_v",
}


def context(spec: AttentionBackwardSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    kind, shares_rows = element(operation.element), schedule.cluster_split == "rows"
    ordered = "ticket_cluster" if schedule.cluster_size > 1 else "ticket"
    number = ordered if operation.deterministic else "grid"
    bounded = operation.mask != "none"
    # Warps that make the words of dropout, beside those that add dq.
    makers = 1 if schedule.accumulate == "bulk" else 3
    crowded = (
        (operation.dim, schedule.q_tile) in CROWDED_CAPS
        and operation.caps
        and schedule.overlap
        and shares_rows
    )
    return {
        **modifiers.context(operation.modifiers),
        "element": kind,
        "packed_type": {"fp16": "f16x2", "bf16": "bf16x2"}[kind.name],
        "row_threads": ROW_THREADS,
        "row_lanes": 1 << (operation.dim // 8 - 1).bit_length(),
        "scores_wgmma": wgmma(kind, kind, layout.q_rows, name="ScoresWgmma"),
        "held_wgmma": wgmma(kind, kind, layout.q_rows, name="HeldWgmma", a_in_registers=True),
        "key_wgmma": wgmma(
            kind,
            kind,
            layout.columns,
            name="KeyWgmma",
            a_in_registers=not shares_rows,
            a_k_major=not shares_rows,
            b_k_major=False,
        ),
        "value_wgmma": wgmma(
            kind,
            kind,
            layout.value_columns,
            name="ValueWgmma",
            a_in_registers=not shares_rows,
            a_k_major=not shares_rows,
            b_k_major=False,
        ),
        **(_UNLIKE if operation.dim_v else _LIKE),
        "query_wgmma": wgmma(
            kind,
            kind,
            layout.query_n,
            name="QueryWgmma",
            a_k_major=not layout.swap,
            b_k_major=layout.swap,
        ),
        "scored": operation.scored,
        "hides": operation.hides,
        "reads": operation.masked or operation.bias != "none",
        "placed": operation.masked or operation.bias == "fp32" or operation.placed,
        "places": True,
        "column_pairs": False,  # two accumulators are of one column
        "staged": operation.staged,
        # Where it hides nothing of a tile, scores are as they are without it. Pairs of the widest
        # heads have no registers for the branch, and with a cap ptxas serialises products.
        "mask_alone": operation.mask_alone
        and not operation.caps
        and not (operation.dim == WIDEST and schedule.overlap and shares_rows),
        "leans": False,
        "coarse_lse": COARSE_LSE,
        # Whether the producer branches on where do is: pairs with overlap that stage dq have no
        # register for the address of a map.
        "branches": operation.masks_rows
        and shares_rows
        and schedule.overlap
        and schedule.accumulate == "bulk",
        "ptx_type": {"fp16": "f16", "bf16": "bf16"}[kind.name],
        "bias_element": element(kind.name if operation.bias == "none" else operation.bias),
        "makers": makers,
        "header": described(spec, layout, makers, number),
        # Whether a weight is dropped is asked once, for p and ds: what else is kept leaves no room.
        "fused": operation.dropout
        and not (schedule.overlap or operation.scored or operation.caps or operation.blocks)
        and layout.q_rows == schedule.q_tile <= MOST_FUSED,
        # By the probability that a weight is kept; ds leaves as it is where a bias has a gradient.
        "divides_gradients": operation.dropout and not operation.bias_gradient,
        "divides_weights": operation.dropout and operation.bias_gradient,
        "bounds_left": operation.mask == "window",
        "bounds_right": bounded,
        # What bounds are relative to, beside a row.
        "diagonal": " + diagonal" if bounded and operation.lengths == "packed" else "",
        "shares_rows": shares_rows,
        # The first of a CTA's query heads among those of its KV head, and how it goes to the next.
        "rank": "rank()" if schedule.cluster > 1 else "0",
        "plus_rank": " + rank()" if schedule.cluster > 1 else "",
        "next_head": "i += kCluster" if schedule.cluster > 1 else "++i",
        # Whether do has fewer stages than q, and what its stage and phase are called.
        "single_do": layout.do_stages < layout.stages,
        "of_do": "of_do" if layout.do_stages < layout.stages else "at",
        "held": layout.held_steps > 0,
        # Whether there is something to wait for behind the last step.
        "ends": schedule.overlap or shares_rows or operation.bias_gradient,
        # Whether dk and dv of a cluster fit in shared memory at the same time.
        "together": 2 * WGMMA_M * schedule.warpgroups * layout.columns * 4
        <= 2 * layout.kv_bytes + (layout.stages + layout.do_stages) * layout.q_bytes,
        "shares_work": operation.deterministic
        or operation.lengths == "packed"
        or operation.blocks
        or operation.scored
        or operation.dropout
        or crowded,
        "order_part": "listed"
        if operation.blocks
        else "fixed"
        if operation.deterministic
        else "any",
        # Whether what lists say of a q tile is read once dp's products are under way, which else
        # wait for it. Where writers add dq a step takes 1 % longer so (H100).
        "reads_late": operation.blocks and schedule.accumulate == "direct",
        "gradients_part": "alone" if schedule.cluster == 1 else "cluster",
        "number_part": number,
        "steps_part": ("pair_" if shares_rows else "")
        + ("overlapped" if schedule.overlap else "serial"),
        "query_part": "swapped" if layout.swap else "straight",
    }

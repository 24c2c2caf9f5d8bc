"""What the backward template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from functools import partial
from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._attention import template as modifiers
from warploom.generator.families.attention_backward.header import described
from warploom.generator.families.attention_backward.launch import ROW_THREADS
from warploom.generator.families.attention_backward.layout import (
    CROWDED_CAPS,
    AttentionBackwardLayout,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardSpec,
)
from warploom.generator.wgmma import WGMMA_M, wgmma

MOST_FUSED = 96  # rows of q
WIDEST = 256
# From this size on lse is too coarse for weights exp(score - lse), which are divided by their sum
# then. fp32 numbers just below it are 2^-11 apart: weights are off by at most 2^-12, less than the
# rounding of a weight to 16 bits.
COARSE_LSE = 4096


def context(spec: AttentionBackwardSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    kind, shares_rows = element(operation.element), schedule.cluster_split == "rows"
    ordered = "ticket_cluster" if schedule.cluster_size > 1 else "ticket"
    number = ordered if operation.deterministic else "grid"
    # Warps that make the words of dropout, beside those that add dq.
    makers = 1 if schedule.accumulate == "bulk" else 3
    # Where it hides nothing of a tile, scores are as they are without it. Pairs of the widest heads
    # have no registers for the branch, and with a cap ptxas serialises products.
    mask_alone = (
        operation.mask_alone
        and not operation.caps
        and not (operation.dim == WIDEST and schedule.overlap and shares_rows)
    )
    # Whether a weight is dropped is asked once, for p and ds: what else is kept leaves no room.
    fused = (
        operation.dropout
        and not (schedule.overlap or operation.scored or operation.caps or operation.blocks)
        and layout.q_rows == schedule.q_tile <= MOST_FUSED
    )
    crowded = (
        (operation.dim, schedule.q_tile) in CROWDED_CAPS
        and operation.caps
        and schedule.overlap
        and shares_rows
    )
    # Where a consumer has no registers for the CTA's work, it is in shared memory.
    shares_work = (
        operation.deterministic
        or operation.lengths == "packed"
        or operation.blocks
        or operation.scored
        or operation.dropout
        or crowded
    )
    shared = modifiers.context(operation.modifiers)
    return {
        **shared,
        **modifiers.of_scores(operation, leans=False),
        "parts": _parts(spec, layout, shared["parts"], mask_alone, number),
        "slope_part": f"{shared['capped']}#slope"
        if shared["capped"]
        else "attention_backward/slope_plain.cuh",
        "element": kind,
        "packed_type": {"fp16": "f16x2", "bf16": "bf16x2"}[kind.name],
        "query_heads": "p.all_kv_heads * p.sharing" if operation.lengths == "packed" else "p.heads",
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
        "query_wgmma": wgmma(
            kind,
            kind,
            layout.query_n,
            name="QueryWgmma",
            a_k_major=not layout.swap,
            b_k_major=layout.swap,
        ),
        "placed": operation.masked or operation.bias == "fp32" or operation.placed,
        "places": True,
        "column_pairs": False,  # two accumulators are of one column
        "mask_alone": mask_alone,
        # Whether the producer branches on where do is: pairs with overlap that stage dq have no
        # register for the address of a map.
        "branches": operation.masks_rows
        and shares_rows
        and schedule.overlap
        and schedule.accumulate == "bulk",
        "fused": fused,
        # Whether a q tile has the number of its varlen sequence, as those of KV tiles have.
        "numbers_q_tiles": operation.dropout or operation.bias != "none",
        # By the probability that a weight is kept; ds leaves as it is where a bias has a gradient.
        "divides_gradients": operation.dropout and not operation.bias_gradient,
        "divides_weights": operation.dropout and operation.bias_gradient,
        # Whether do has fewer stages than q.
        "single_do": layout.do_stages < layout.stages,
        "coarse_lse": COARSE_LSE,
        "ptx_type": {"fp16": "f16", "bf16": "bf16"}[kind.name],
        "makers": makers,
        "header": described(spec, layout, makers, number, shares_work=shares_work),
        "shares_rows": shares_rows,
        "held": layout.held_steps > 0,
        # Whether there is something to wait for behind the last step.
        "ends": schedule.overlap or shares_rows or operation.bias_gradient,
        # Whether dk and dv of a cluster fit in shared memory at the same time.
        "together": 2 * WGMMA_M * schedule.warpgroups * layout.columns * 4
        <= 2 * layout.kv_bytes + (layout.stages + layout.do_stages) * layout.q_bytes,
        "shares_work": shares_work,
        "order_part": "listed"
        if operation.blocks
        else "fixed"
        if operation.deterministic
        else "any",
        # Whether what lists say of a q tile is read once dp's products are under way, which else
        # wait for it. Where writers add dq a step takes 1 % longer so (H100).
        "reads_late": operation.blocks and schedule.accumulate == "direct",
        "locate_part": "listed" if operation.blocks else "bounds",
        "tiles_part": "listed" if operation.blocks else "of_heads",
        "gradients_at": "boxes" if schedule.cluster == 1 else "columns",
        "gradients_part": "alone" if schedule.cluster == 1 else "cluster",
        "number_part": number,
        "steps_part": ("pair_" if shares_rows else "")
        + ("overlapped" if schedule.overlap else "serial"),
        "query_part": "swapped" if layout.swap else "straight",
    }


def _parts(
    spec: AttentionBackwardSpec,
    layout: AttentionBackwardLayout,
    own: list[str],
    mask_alone: bool,
    number: str,
) -> list[str]:
    """Return the files of all options, in the order in which hooks include them.

    `own` are those of modifiers.
    """
    operation, schedule = spec.operation, spec.schedule
    pair = schedule.cluster_split == "rows"
    before = {
        "pair": pair,
        f"accumulate_{schedule.accumulate}": True,
        f"mask_{'none' if operation.mask == 'none' else 'bounds'}": not operation.blocks,
        "values_apart": bool(operation.dim_v),
        "cluster": schedule.cluster > 1,
        "bias_gradient": operation.bias_gradient,
        "fully_masked": operation.masks_rows,
        "single_do": layout.do_stages < layout.stages,
    }
    adds = any(modifier.adds for modifier in operation.modifiers)
    behind = {
        "tiles_in_order": not operation.blocks,
        "weights_kept": not operation.dropout,
        "weights_plain": not adds,
        "weights_added": adds and operation.bias == "none",
        "scored": operation.scored,
        "staged": operation.staged,
        "mask_alone": mask_alone,
        "trims": operation.trims,
        "single_ds": layout.ds_stages == 1 and not pair,
        "cluster_ticket": number == "ticket_cluster",
    }

    files = partial(modifiers.options, "attention_backward")
    separate = [modifiers.SEPARATE_BATCHES] * (operation.bias == "none")
    return [*files(before), *own, *files(behind), *separate]

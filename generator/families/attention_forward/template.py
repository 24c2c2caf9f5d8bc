"""What the attention template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.attention_forward.schedule import AttentionSpec
from warploom.generator.wgmma import wgmma


def context(spec: AttentionSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    kind = element(operation.element)
    return {
        "element": kind,
        "packed_type": {"fp16": "f16x2", "bf16": "bf16x2"}[kind.name],
        "scores_wgmma": wgmma(kind, kind, schedule.kv_tile, name="ScoresWgmma"),
        "output_wgmma": wgmma(
            kind,
            kind,
            operation.dim,
            name="OutputWgmma",
            a_in_registers=True,
            b_k_major=False,
        ),
        "scored": operation.scored,
        "hides": operation.hides,
        "staged": operation.staged,
        # Beside a bias or mask, which are added to every score anyway, it is not worth a branch.
        "leans": operation.alibi and not operation.hides,
        "bias_element": element(kind.name if operation.bias == "none" else operation.bias),
        # Warps that make the words of dropout.
        "makers": 3,
        "bounds_left": operation.mask == "window",
        "bounds_right": operation.mask != "none",
        # The output of a wide head takes long to rescale: it is done under the product of scores.
        "rescales_between": schedule.overlap and operation.dim > 128,
        "hide": "shown.hide(scores)"
        if operation.blocks
        else "mask(scores, c.p, c.columns, c.row, n * kKvTile + c.column)",
        "scaling_part": "softcap" if operation.softcap else "plain",
        "turns_part": "pingpong" if schedule.pingpong else "free",
        "steps_part": "overlapped" if schedule.overlap else "serial",
    }

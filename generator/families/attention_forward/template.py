"""What the attention template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._attention import template as modifiers
from warploom.generator.families.attention_forward.header import described
from warploom.generator.families.attention_forward.launch import KEYS_THREADS
from warploom.generator.families.attention_forward.layout import attention_layout
from warploom.generator.families.attention_forward.rules import KEYS_OF_A_SCALE
from warploom.generator.families.attention_forward.schedule import AttentionOperation, AttentionSpec
from warploom.generator.wgmma import TemplateText, wgmma

MAKERS = 3  # warps that make the words of dropout
MOST_BETWEEN = 160  # columns
# Of the exponents of weights of e4m3, which end at 448: together below 8.8.
OFFSET, OFFSET_IF_NEEDED, SLACK = 8, 4, 4


def context(spec: AttentionSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = attention_layout(spec.architecture, operation, schedule)
    kind = element(operation.element)
    multiplied, values = operation.element_of("k"), operation.element_of("v")
    bounded = operation.mask != "none"
    offset = OFFSET_IF_NEEDED if schedule.rescale == "needed" else OFFSET
    # Before scores are there; what changes them leaves no registers for words.
    takes_early = (
        operation.dropout and schedule.overlap and not (operation.scored or operation.blocks)
    )
    return {
        **modifiers.context(operation.modifiers),
        "element": kind,
        "packed_type": {"fp16": "f16x2", "bf16": "bf16x2"}[kind.name],
        "scores_wgmma": wgmma(multiplied, multiplied, schedule.kv_tile, name="ScoresWgmma"),
        "output_wgmma": wgmma(
            values,
            values,
            operation.value_dim,
            name="OutputWgmma",
            a_in_registers=True,
            b_k_major=values.bits == 8,
        ),
        "values_part": operation.weights,
        # v has boxes and descriptors of its own: of another type, layout or dimension than k.
        "values_apart": operation.eight or operation.dim_v > 0,
        "value_dim": TemplateText("kDimV" if operation.dim_v else "kDim"),
        # Where products with v go, and in what order these accumulators are handed on.
        "product": "product" if operation.promoted else "output",
        "outputs": "output, product" if operation.promoted else "output",
        "keys_of_a_scale": KEYS_OF_A_SCALE,
        "offset": offset,
        "slack": SLACK,
        "most": offset + (SLACK if schedule.rescale == "needed" else 0),
        # Of a row, in the argument of exp2: what its sum is relative to.
        "maximum": TemplateText(
            "rows.maximum[r]" + (" - kOffset" if values.bits == 8 else "")
            if operation.eight
            else "rows.maximum[r] * c.scaling.exponent"
        ),
        "number": TemplateText(
            "sequence.number" if operation.lengths == "packed" else "sequence.batch"
        ),
        "scored": operation.scored,
        "hides": operation.hides,
        "reads": operation.masked or operation.bias != "none",
        "placed": operation.bias == "fp32" or operation.placed,
        "changed": _changed(operation),
        "staged": operation.staged,
        # Where a mask of keys hides nothing of a tile, scores are as they are without it.
        "mask_alone": operation.mask_alone,
        "keys_threads": KEYS_THREADS,
        # Beside a bias or mask, which are added to every score anyway, it is not worth a branch.
        "leans": operation.leans,
        "bias_element": element(kind.name if operation.bias == "none" else operation.bias),
        "makers": MAKERS,
        "header": described(spec, layout, MAKERS),
        "takes_early": takes_early,
        # All of the softmax runs under the output's products: faster at dimension 128 without a
        # mask, slower with one, and at 64 (docs/notebook.md). Wider tiles have no registers for it.
        "waits_between": takes_early
        and operation.dim == 128
        and operation.mask == "none"
        and schedule.kv_tile <= MOST_BETWEEN,
        "bounds_left": operation.mask == "window",
        "bounds_right": bounded,
        # Whether a CTA may load KV tiles that only some of its warpgroups need.
        "skips": bounded and not operation.blocks,
        # What bounds are relative to, beside a row.
        "diagonal": " + diagonal" if bounded and operation.lengths == "packed" else "",
        "places": not operation.blocks,
        "column_pairs": True,  # two accumulators are of one row
        # The output of a wide head takes long to rescale: it is done under the product of scores.
        "rescales_between": schedule.overlap and operation.value_dim > 128,
        "hide": "shown.hide(scores)"
        if operation.blocks
        else TemplateText(
            "mask(scores, c.p, c.columns, c.row, n * kKvTile + c.column)"
            if bounded
            else "mask(scores, c.columns, n * kKvTile + c.column)"
        ),
        "steps_part": "eight"
        if operation.eight
        else "overlapped"
        if schedule.overlap
        else "serial",
    }


def _changed(operation: AttentionOperation) -> TemplateText:
    """Return C++ of the score of accumulator j, with what is added to it, or -inf."""
    score = "scores[j]"
    if operation.bias != "none":
        score = "fmaf(scores[j], scaling.factor, score.term(j, eight))"
    elif any(modifier.adds for modifier in operation.modifiers):
        score = f"score.add{'<kLeans>' * operation.leans}(j, scores[j])"
    hidden = "score.hides(j, eight) ? minus_infinity() : " * operation.masked
    return TemplateText(hidden + score)

"""What the attention template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from functools import partial
from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._attention import template as modifiers
from warploom.generator.families.attention_forward.header import described
from warploom.generator.families.attention_forward.launch import KEYS_THREADS
from warploom.generator.families.attention_forward.layout import attention_layout
from warploom.generator.families.attention_forward.rules import KEYS_OF_A_SCALE
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
    AttentionSpec,
)
from warploom.generator.wgmma import TemplateText, wgmma

MAKERS = 3  # warps that make the words of dropout
MOST_BETWEEN = 160  # columns
# Of the exponents of weights of e4m3, which end at 448: together below 8.8.
OFFSET, OFFSET_IF_NEEDED, SLACK_8 = 8, 4, 4
SLACK = 8  # the same of weights of 16 bits: of 256 they are as exact as of 1


def context(spec: AttentionSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = attention_layout(spec.architecture, operation, schedule)
    kind = element(operation.element)
    multiplied, values = operation.element_of("k"), operation.element_of("v")
    # Before scores are there; what changes them leaves no registers for words.
    takes_early = (
        operation.dropout and schedule.overlap and not (operation.scored or operation.blocks)
    )
    waits_between = (
        takes_early
        and operation.dim == 128
        and operation.mask == "none"
        and schedule.kv_tile <= MOST_BETWEEN
    )
    lazy = schedule.rescale == "needed"
    # The output of a wide head takes long to rescale: it is done under the product of scores.
    rescales_between = schedule.overlap and operation.value_dim > 128
    shared = modifiers.context(operation.modifiers)
    return {
        **shared,
        # Beside a bias or mask, which are added to every score anyway, it is not worth a branch.
        **modifiers.of_scores(operation, leans=operation.leans),
        "parts": _parts(operation, schedule, shared["parts"]),
        "element": kind,
        "packed_type": {"fp16": "f16x2", "bf16": "bf16x2"}[kind.name],
        "box_columns": "kSpan" if operation.eight else "kSpan / 2",
        "scores_wgmma": wgmma(multiplied, multiplied, schedule.kv_tile, name="ScoresWgmma"),
        "output_wgmma": wgmma(
            values,
            values,
            operation.value_dim,
            name="OutputWgmma",
            a_in_registers=True,
            b_k_major=values.bits == 8,
        ),
        # v has boxes and descriptors of its own: of another type or dimension than k.
        "values_apart": operation.eight or operation.dim_v > 0,
        "value_dim": TemplateText("kDimV" if operation.dim_v else "kDim"),
        "weight_bits": values.bits,
        "weights_k": 256 // values.bits,  # columns of one MMA
        "scaling_part": f"attention_forward/scaling_{operation.scales}.cuh.jinja"
        if operation.eight
        else shared["scaling_part"],
        # Of one sequence; packed sequences count as one batch.
        "query_heads": "p.all_heads" if operation.lengths == "packed" else "p.heads",
        "offset": OFFSET_IF_NEEDED if lazy else OFFSET,
        "most": OFFSET_IF_NEEDED + SLACK_8 if lazy else OFFSET,
        "slack": SLACK if operation.weights == "same" else SLACK_8,
        # Whether a CTA may load KV tiles that only some of its warpgroups need.
        "skips": operation.mask != "none",
        "one_q": "n" if layout.q_stages == 1 else "",
        "keys_of_a_scale": KEYS_OF_A_SCALE,
        "placed": operation.bias == "fp32" or operation.placed,
        "changed": _changed(operation),
        # Where a mask of keys hides nothing of a tile, scores are as they are without it.
        "mask_alone": operation.mask_alone,
        "keys_threads": KEYS_THREADS,
        "change_part": "leans" if operation.leans else "mask" if operation.mask_alone else "any",
        "makers": MAKERS,
        "producer_part": f"attention_forward/producer{'_listed' * operation.blocks}.cuh.jinja",
        "header": described(spec, layout, MAKERS),
        "takes_early": takes_early,
        # All of the softmax runs under the output's products: faster at dimension 128 without a
        # mask, slower with one, and at 64 (docs/notebook.md). Wider tiles have no registers for it.
        "waits_between": waits_between,
        "holds_softmax": waits_between or rescales_between,
        "places": not operation.blocks,
        "column_pairs": True,  # two accumulators are of one row
        "rescales_between": rescales_between,
        "steps_part": "8" if operation.eight else "overlapped" if schedule.overlap else "serial",
    }


def _parts(operation: AttentionOperation, schedule: AttentionSchedule, own: list[str]) -> list[str]:
    """Return the files of all options, in the order in which hooks include them.

    `own` are those of modifiers.
    """
    mask = "none" if operation.mask == "none" else "bounds"
    before = {
        "mask_window": operation.mask == "window",
        f"mask_{mask}": not operation.blocks,
        "values_apart": operation.eight or operation.dim_v > 0,
        "eight": operation.eight,
        "int8": operation.scores == "int8",
        "weights_8": operation.weights != "same",
        "lazy_rescale": schedule.rescale == "needed",
        "scored": operation.scored,
        "staged": operation.staged,
        "leans": operation.leans,
        "mask_alone": operation.mask_alone,
        "trims": operation.trims,
    }
    behind = {"promoted": operation.promoted, "pingpong": schedule.pingpong}

    files = partial(modifiers.options, "attention_forward")
    separate = [modifiers.SEPARATE_BATCHES] * (operation.bias == "none")
    return [*files(before), *own, *files(behind), *separate]


def _changed(operation: AttentionOperation) -> TemplateText:
    """Return C++ of the score of accumulator j, with what is added to it, or -inf."""
    score = "scores[j]"
    if operation.bias != "none":
        score = "fmaf(scores[j], scaling.factor, score.term(j, eight))"
    elif any(modifier.adds for modifier in operation.modifiers):
        score = f"score.add{'<kLeans>' * operation.leans}(j, scores[j])"
    hidden = "score.hides(j, eight) ? minus_infinity() : " * operation.masked
    return TemplateText(hidden + score)

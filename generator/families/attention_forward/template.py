"""What the attention template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._attention import template as modifiers
from warploom.generator.families.attention_forward.header import choices, described
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
    # The output of a wide head takes long to rescale: it is done under the product of scores.
    rescales_between = schedule.overlap and operation.value_dim > 128
    shared = modifiers.context(operation.modifiers)
    return {
        **shared,
        **_of_values(operation),
        **_of_softmax(operation, schedule.rescale == "needed"),
        **_of_bounds(operation),
        "parts": _parts(operation, schedule, shared["parts"]),
        "choices": choices(spec),
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
        "weight_bits": values.bits,
        "weights_k": 256 // values.bits,  # columns of one MMA
        "scaling_part": f"attention_forward/scaling_{operation.scales}.cuh.jinja"
        if operation.eight
        else f"{shared['capped']}#scaling"
        if shared["capped"]
        else "_attention/scaling_plain.cuh.jinja",
        "number": TemplateText(
            "sequence.number" if operation.lengths == "packed" else "sequence.batch"
        ),
        "q_readers": "4 + (consumer == 0) * kMakers" if operation.dropout else "4",
        "one_q": "n" if layout.q_stages == 1 else "",
        "keys_of_a_scale": KEYS_OF_A_SCALE,
        "scored": operation.scored,
        "hides": operation.hides,
        "reads": operation.masked or operation.bias != "none",
        "placed": operation.bias == "fp32" or operation.placed,
        "changed": _changed(operation),
        "staged": operation.staged,
        # Where a mask of keys hides nothing of a tile, scores are as they are without it.
        "mask_alone": operation.mask_alone,
        "next_every": "<kEvery>" if operation.mask_alone else "",
        "every_parameter": ", bool kEvery = false" if operation.mask_alone else "",
        "every_argument": ", kEvery" if operation.mask_alone else "",
        "stages_first": TemplateText(
            "any && c.hides(work.end - 1)" if operation.mask_alone else "any"
        ),
        "keys_threads": KEYS_THREADS,
        # Beside a bias or mask, which are added to every score anyway, it is not worth a branch.
        "leans": operation.leans,
        "change_part": "leans" if operation.leans else "mask" if operation.mask_alone else "any",
        "change_rows": "rows, " if operation.leans else "",
        "rows_offset": "{0, 0}, " if operation.leans else "",
        "staging_argument": "staging(), " if operation.staged else "",
        "unit_argument": ""
        if operation.bias != "none"
        else ", __fdividef(kLog2E, scaling.exponent)",
        "bias_element": element(kind.name if operation.bias == "none" else operation.bias),
        "makers": MAKERS,
        "producer_part": "producer_listed" if operation.blocks else "producer",
        "header": described(spec, layout, MAKERS),
        "takes_early": takes_early,
        "weigh": "keep(weights, packed, dropped)" if takes_early else "pack(weights, scores)",
        # All of the softmax runs under the output's products: faster at dimension 128 without a
        # mask, slower with one, and at 64 (docs/notebook.md). Wider tiles have no registers for it.
        "waits_between": waits_between,
        "holds_softmax": waits_between or rescales_between,
        "places": not operation.blocks,
        "column_pairs": True,  # two accumulators are of one row
        "rescales_between": rescales_between,
        "consumer_members": ("Scaling(p)" if operation.caps or not operation.eight else "Scaling()")
        + ", OrderedBarrier(consumer)" * schedule.pingpong,
        "first_output": "" if schedule.overlap else "output, ",
        "last_rows": ", rows" if rescales_between else "",
        "steps_part": "8" if operation.eight else "overlapped" if schedule.overlap else "serial",
    }


def _parts(
    operation: AttentionOperation, schedule: AttentionSchedule, modifiers: list[str]
) -> list[str]:
    """Return the files of all options of a kernel, in the order in which hooks include them."""
    mask = {"none": "none", "causal": "bounds", "window": "bounds"}[operation.mask]
    before = {
        "mask_window": operation.mask == "window",
        f"mask_{mask}": not operation.blocks,
        "values_apart": _values_apart(operation),
        "eight": operation.eight,
        "int8": operation.scores == "int8",
        "weights_8": operation.weights != "same",
        "lazy_rescale": schedule.rescale == "needed",
        "scored": operation.scored,
        "leans": operation.leans,
        "mask_alone": operation.mask_alone,
        "trims": operation.trims,
    }
    behind = {"promoted": operation.promoted, "pingpong": schedule.pingpong}

    def files(options: dict[str, bool]) -> list[str]:
        return [f"attention_forward/{name}.cuh.jinja" for name, has in options.items() if has]

    return [*files(before), *modifiers, *files(behind)]


def _values_apart(operation: AttentionOperation) -> bool:
    """Whether v has boxes and descriptors of its own: of another type or dimension than k."""
    return operation.eight or operation.dim_v > 0


def _of_values(operation: AttentionOperation) -> dict[str, Any]:
    """What is said of v: how it is loaded, and where the keys of one MMA are."""
    apart, promoted = _values_apart(operation), operation.promoted
    scaled = operation.weights != "same"
    return {
        "values_apart": apart,
        "values_part": operation.element_of("v").bits,
        "own_value_dim": f"kDimV = {operation.dim_v}, " if operation.dim_v else "",
        "value_dim": TemplateText("kDimV" if operation.dim_v else "kDim"),
        "v_bytes": "Values::kBytes" if apart else "kStageBytes",
        "v_keys": "Values::keys(step)" if apart else "step * OutputWgmma::kK * kSpan / 16",
        "load_v": "load_values(p" if apart else "load(p.v_map",
        "load_listed_v": "load_values(p, shared"
        if apart
        else "load(p.v_map, shared.v_full, shared.v_empty, shared.v",
        # Where products with v go, and in what order these accumulators are handed on.
        "product": "product" if promoted else "output",
        "outputs": "output, product" if promoted else "output",
        "product_declared": ", product[kOutputs]" if promoted else "",
        "product_parameter": "float (&product)[kOutputs], " if promoted else "",
        "rescaled": "" if promoted else "output",
        "output_fence": "anything" if promoted else "fence",
        "accumulates": "step > 0" if promoted else "true",
        "scores_fence": "anything" if operation.eight else "fence",
        "scores_accumulator": "sums_of(scores)" if operation.scores == "int8" else "scores",
        "value_scale": "value_scale" if scaled else "1",
        "times_value_scale": " * value_scale" if scaled else "",
        "times_keep": " * c.p.keep" if operation.dropout else "",
    }


def _of_softmax(operation: AttentionOperation, lazy: bool) -> dict[str, Any]:
    """What is said of exponents, and of the sums of rows."""
    scaled, biased = operation.weights != "same", operation.bias != "none"
    offset, slack = OFFSET_IF_NEEDED if lazy else OFFSET, SLACK_8 if scaled else SLACK
    maximum = "rows.maximum[r]"
    if operation.eight:
        maximum += " - kOffset" * scaled
    elif not biased:
        maximum += " * c.scaling.exponent"
    note = ", or kSlack below it" * lazy + ", times their factor in the exponent" * operation.eight
    sinks = [modifier for modifier in operation.modifiers if modifier.column]
    return {
        "offset": offset,
        "slack": slack,
        "most": offset + SLACK_8 * lazy,
        # Of a row, in the argument of exp2: what its sum is relative to.
        "maximum": TemplateText(maximum),
        "maximum_note": note,
        "score_scale": "__fdividef(p.scale, p.softcap)" if operation.caps else "p.scale * kLog2E",
        "sum_part": "sink" if sinks else "plain",
        "sink": TemplateText(
            "".join(one.extra_score("c.p", "work.head") for one in sinks)
            + " * kLog2E" * (not biased)
        ),
        "in_base_2": lambda x: TemplateText(f"({x}) * kLog2E" if biased else x),
        "log_sum": lambda reference, total: TemplateText(
            f"{reference} + fast_log2({total}) * kLn2"
            if biased
            else f"({reference} + fast_log2({total})) * kLn2"
        ),
    }


def _of_bounds(operation: AttentionOperation) -> dict[str, Any]:
    """What is said of the columns that a row may attend to."""
    bounded, window = operation.mask != "none", operation.mask == "window"
    # What bounds are relative to, beside a row.
    diagonal = " + diagonal" if bounded and operation.lengths == "packed" else ""
    full_begin = "full_begin" if window else "begin"
    left = f"row{diagonal} - p.left" if window else "0"
    begin = f"max({left}, keys.x)" if operation.trims else left * window
    end = "(end + kKvTile - 1) / kKvTile"
    hidden = "mask(scores, c.columns, n * kKvTile + c.column)"
    if bounded:
        hidden = "mask(scores, c.p, c.columns, c.row, n * kKvTile + c.column)"
    return {
        "bounds_left": window,
        "bounds_right": bounded,
        "diagonal": diagonal,
        # Whether a CTA may load KV tiles that only some of its warpgroups need.
        "skips": bounded,
        "also_skipped": "shared.work[q.stage][consumer].skipped = " if bounded else "",
        "full_begin": full_begin,
        "masked_n": TemplateText("n >= work.full_end" + " || n < work.full_begin" * window),
        "hidden_place": TemplateText("place >= end" + " || place < begin" * window),
        "begin": TemplateText(begin),
        "first_tile": "begin / kKvTile" if begin else "0",
        "skipped": TemplateText(
            f"max(0, work.end - max(work.begin, {end}))"
            if operation.trims
            else f"work.end - max(work.begin, {end})"
        ),
        "shown_tiles": TemplateText(
            ",\n          (keys.z + kKvTile - 1) / kKvTile, shown_end" * operation.mask_alone
        ),
        "columns_part": "shown" if operation.trims else "all",
        "hide": TemplateText("shown.hide(scores)" if operation.blocks else hidden),
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

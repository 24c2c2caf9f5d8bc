"""What the template of a mixed-input GEMM is rendered with: its options, and the words of these."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product import template
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families._product.operand import Operand
from warploom.generator.families.mixed_gemm.header import described, summary
from warploom.generator.families.mixed_gemm.layout import LOADING_REGISTERS, mixed_gemm_layout
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSpec
from warploom.generator.wgmma import wgmma


def context(spec: MixedGemmSpec) -> dict[str, Any]:
    """What this family's template is rendered with, in addition to what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = mixed_gemm_layout(operation, schedule)
    a, scale = element(operation.a), layout.slab.scale_type
    decoded = operation.weight.decoded_as or operation.b
    by_wgmma, columns = schedule.multiply == "wgmma", schedule.columns // max(1, schedule.lookahead)
    shared = template.context(
        operation,
        schedule,
        layout,
        groups=operation.groups,
        exchanged=gate_of(operation.epilogue) is not None,
        ahead=schedule.sources == 1,
    )
    floats = scale.bytes == 4 or not operation.group
    multiplies = schedule.scaled == "weights"  # weights, and not accumulators, by scales
    converted = multiplies and scale.name not in (operation.a, "e8m0", "e4m3")
    factors = ["both" if converted else "scales"] * multiplies
    promoted = schedule.scaled == "sums" and operation.promoted > 0
    return {
        **shared,
        "parts": [*shared["parts"], *_options(spec, converted=converted, promoted=promoted)],
        "accumulators": "mainloop.accumulators",
        "a": a,
        "operand_a": Operand(
            operation, schedule, layout.a, "m", operation.groups, trims=layout.trims_a
        ),
        "decode": f"{decoded}_{operation.a}{'_scaled' * multiplies}",
        "decoded_with": factors + ["zeros"] * operation.weight.has_zeros,
        "scale": scale,
        "floats": floats,  # whether a thread has scales in fp32
        "reads_scales": not multiplies or converted,
        "scales_part": "floats" if floats else scale.name,
        "release_part": "mixed_gemm/release.cuh" if by_wgmma else "common/release_read.cuh",
        "wgmma": wgmma(a, a, columns, a_in_registers=True, has_k=False) if by_wgmma else "",
        "promoted": promoted,
        "reallocates_registers": schedule.reallocates,
        "loading_registers": LOADING_REGISTERS,
        "shared_sums": schedule.sources > 1,
        "most_groups": MOST_GROUPS,
        "summary": summary(spec),
        "header": described(spec, layout),
    }


def _options(spec: MixedGemmSpec, *, converted: bool, promoted: bool) -> list[str]:
    """The files of the options of a kernel, in the order in which hooks include them."""
    operation, schedule = spec.operation, spec.schedule
    multiplies = schedule.scaled == "weights"
    applies = {
        "grouped": operation.groups == "rows",
        "zeros": operation.weight.has_zeros,
        "scales_of_groups": operation.group > 0,
        "scales_of_channels": operation.group == 0,
        "scales_of_both": operation.weight.scaled_twice,
        "converted_scales": converted,
        "scaled_weights": multiplies,
        "scaled_sums": not multiplies,
        "banks": promoted,
        "one_bank": not promoted,
        "total_of_sources": schedule.sources > 1,
        "total_alone": schedule.sources == 1,
        "stream_k": schedule.stream_k,
    }
    return [f"mixed_gemm/{name}.cuh.jinja" for name, has in applies.items() if has]

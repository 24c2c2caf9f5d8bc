"""What the template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product import template
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families.mixed_gemm.header import described, summary
from warploom.generator.families.mixed_gemm.layout import (
    LOADING_REGISTERS,
    mixed_gemm_layout,
)
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSpec
from warploom.generator.wgmma import wgmma


def context(spec: MixedGemmSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    a = element(operation.a)
    decoded = operation.weight.decoded_as or operation.b
    by_wgmma, columns = schedule.multiply == "wgmma", schedule.columns // max(1, schedule.lookahead)
    return {
        **template.context(operation, schedule, mixed_gemm_layout(operation, schedule)),
        "a": a,
        "decode": f"{decoded}_{operation.a}{'_scaled' if schedule.scaled == 'weights' else ''}",
        "wgmma": wgmma(a, a, columns, a_in_registers=True, has_k=False) if by_wgmma else "",
        "promoted": schedule.scaled == "sums" and operation.promoted > 0,
        "reallocates_registers": schedule.reallocates,
        "loading_registers": LOADING_REGISTERS,
        "shared_sums": schedule.sources > 1,
        "groups": operation.groups,
        "most_groups": MOST_GROUPS,
        "exchanged": gate_of(operation.epilogue) is not None,
        "summary": summary(spec),
        "header": described(spec, mixed_gemm_layout(operation, schedule)),
    }

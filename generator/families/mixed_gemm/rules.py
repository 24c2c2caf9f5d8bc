"""Which products with weights of few bits, and which of their schedules, are legal."""

from __future__ import annotations

from warploom.generator import rules
from warploom.generator.elements import element
from warploom.generator.epilogue import legal
from warploom.generator.families.mixed_gemm.operation import MixedGemmOperation
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSchedule
from warploom.generator.formats import FORMATS


def operation_reasons(operation: MixedGemmOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    row, d = operation.weight, element(operation.d)
    multiplied = [one.name for one in FORMATS.values() if operation.activations in one.orders]
    groups = tuple(group or 0 for group in row.groups)
    return rules.broken(
        [
            rules.one_of(f"b of a {operation.a}", row.name, multiplied),
            rules.one_of(f"group of {row.name}", operation.group, groups),
            rules.one_of(f"scale of {row.name}", operation.scale, row.scales),
            legal(operation.epilogue),
            *(
                rules.one_of(f"d behind {step.token}", d.name, step.results)
                for step in operation.epilogue
                if step.results
            ),
        ]
    )


def scaled(operation: MixedGemmOperation, schedule: MixedGemmSchedule) -> rules.Reason:
    """Scales are applied to sums or to weights, where these may be rounded at all."""
    if operation.scale == "e8m0" and element(operation.a).bits == 16:
        return rules.one_of("scales e8m0 in", schedule.scaled, ("weights",))
    if element(operation.a).bits == 8 or operation.group == 0:
        what = f"scales of a {operation.a}, group {operation.group}, in"
        return rules.one_of(what, schedule.scaled, ("sums",))
    return None

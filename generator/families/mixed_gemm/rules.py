"""Which products with weights of few bits, and which of their schedules, are legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import (
    gate_of,
    legal,
    quantizes,
    rounds_stochastically,
    scatters,
)
from warploom.generator.families._product.layout import chunks
from warploom.generator.families.mixed_gemm.layout import (
    BARRIER_BYTES,
    MixedGemmLayout,
    mixed_gemm_layout,
    room,
)
from warploom.generator.families.mixed_gemm.schedule import MixedGemmOperation, MixedGemmSchedule
from warploom.generator.formats import FORMATS
from warploom.generator.knob import knobs
from warploom.generator.slabs import DEPTH
from warploom.generator.tensor_maps import operand_reason
from warploom.generator.wgmma import WGMMA_M


def operation_reasons(operation: MixedGemmOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    row, d, gate = operation.weight, element(operation.d), gate_of(operation.epilogue)
    multiplied = [one.name for one in FORMATS.values() if operation.activations in one.orders]
    groups = tuple(group or 0 for group in row.groups)
    return rules.broken(
        [
            rules.one_of(f"b of a {operation.a}", row.name, multiplied),
            rules.one_of(f"group of {row.name}", operation.group, groups),
            rules.one_of(f"scale of {row.name}", operation.scale, row.scales),
            legal(operation.epilogue),
            f"epilogue with {gate.token}: rows of gate and up must be interleaved in a packed "
            "weight; use gate_interleaved, or multiply the halves of the result"
            if gate and gate.layout != "interleaved"
            else None,
            *(
                f"epilogue with {step.token} with {gate.token if gate else 'groups rows'}: must be "
                "without outputs beside D and random numbers"
                for step in operation.epilogue
                if (gate or operation.groups == "rows")
                and (step.auxiliary or step.partial or rounds_stochastically((step,)))
            ),
            *(
                f"epilogue with {step.token} with groups rows: must be without norms"
                for step in operation.epilogue
                if operation.groups == "rows" and step.prepared
            ),
            *(
                f"epilogue with {step.token}: is for gemm; multiply by plain torch operations"
                for step in operation.epilogue
                if step.loads
            ),
            f"epilogue with {operation.epilogue[-1].token}: is for gemm; quantize the result"
            if quantizes(operation.epilogue)
            else None,
            f"epilogue with {operation.epilogue[-1].token}: is for gemm; write the rows to "
            "D[index] afterwards"
            if scatters(operation.epilogue)
            else None,
            *(
                rules.one_of(f"d behind {step.token}", d.name, step.results)
                for step in operation.epilogue
                if step.results
            ),
        ]
    )


def scaled(operation: MixedGemmOperation, schedule: MixedGemmSchedule) -> rules.Reason:
    """Scales are applied to sums or to weights, where these may be rounded at all."""
    if operation.scale in ("e8m0", "e4m3") and element(operation.a).bits == 16:
        return rules.one_of(f"scales {operation.scale} in", schedule.scaled, ("weights",))
    if element(operation.a).bits == 8 or operation.group == 0:
        what = f"scales of a {operation.a}, group {operation.group}, in"
        return rules.one_of(what, schedule.scaled, ("sums",))
    return None


MMA_ROWS = (8, 16, 24, 32)  # of A: each warp reads all of them


def schedule_reasons(
    arch: Architecture, operation: MixedGemmOperation, schedule: MixedGemmSchedule
) -> list[str]:
    """Why the schedule does not fit the operation on `arch`; empty when it does."""
    m, n, k = schedule.tile
    a, gate = element(operation.a), gate_of(operation.epilogue)
    first = rules.broken(
        [
            rules.wgmma_n("tile m", m, integer=a.is_integer)
            if schedule.multiply == "wgmma"
            else rules.one_of("tile m with multiply mma", m, MMA_ROWS),
            None
            if schedule.consumers % schedule.warp_split_k == 0
            else f"warp_split_k {schedule.warp_split_k} of {schedule.consumers} consumers: must "
            "divide them",
            rules.multiple_of("tile n", n, WGMMA_M * max(1, schedule.sharing)),
            rules.multiple_of("tile k", k, DEPTH * schedule.warp_split_k),
            None
            if schedule.cluster_split_k == 1 or not schedule.stream_k
            else f"cluster_split_k {schedule.cluster_split_k} with stream_k: must be 1; ranges "
            "share k by themselves",
            _ahead(operation, schedule) if schedule.lookahead else None,
            f"cluster_split_k {schedule.cluster_split_k}, store {schedule.store} with groups rows: "
            "must be 1 and direct, as groups begin and end at any row"
            if operation.groups == "rows"
            and (schedule.cluster_split_k, schedule.store) != (1, "direct")
            else None,
            f"store {schedule.store} with {gate.token}: must be direct, as a warp has a gate and "
            "its up in one column of a tile"
            if gate and schedule.store != "direct"
            else None,
        ]
    )
    if first:  # what follows would divide by them
        return first
    layout = mixed_gemm_layout(operation, schedule)
    return rules.broken(
        [
            scaled(operation, schedule),
            None
            if schedule.multiply == "wgmma" or a.bits == 16
            else f"multiply mma of a {operation.a}: must be wgmma; mma is for 16 bits",
            _shared(schedule, layout),
            None
            if schedule.store == "direct" or (schedule.sources == 1 and chunks(operation, schedule))
            else f"store tma, tile m {m}, {schedule.sources} that share a tile's sums: takes a "
            "multiple of 16, and sums that nothing shares; use store direct",
            None
            if schedule.store == "direct" or element(operation.d).bits == 16
            else f"store tma, d {operation.d}: takes 16-bit types; use store direct",
            operand_reason("a", layout.a),
            rules.fits_registers(layout.registers, layout.register_budget),
            rules.fits_shared(layout.shared_bytes, arch),
            None
            if layout.shared_bytes <= room(schedule)
            else f"shared memory {layout.shared_bytes} bytes, ctas_per_sm {schedule.ctas_per_sm}: "
            f"must be at most {room(schedule)}; use fewer stages or a smaller tile",
        ]
    )


def _ahead(operation: MixedGemmOperation, schedule: MixedGemmSchedule) -> rules.Reason:
    """Groups are decoded ahead where sums of each are added up, and two take turns in registers."""
    m, parts = schedule.tile[0], schedule.lookahead
    if operation.a != "e4m3" or schedule.multiply != "wgmma":
        return (
            f"lookahead {parts} of a {operation.a}, multiply {schedule.multiply}: must be 0; "
            "others are for e4m3 by wgmma"
        )
    group = operation.promoted * schedule.warp_split_k
    if schedule.tile[2] not in (2 * group, 4 * group):  # of eight the compiler loses track
        return (
            f"lookahead {parts}, tile k {schedule.tile[2]}: must be {2 * group} or {4 * group}, "
            "two groups of each consumer, or four"
        )
    return rules.wgmma_n(f"a part of tile m {m}, lookahead {parts}", m // parts, integer=False)


def _shared(schedule: MixedGemmSchedule, layout: MixedGemmLayout) -> rules.Reason:
    """Who shares a tile's sums finishes as many of its fragments, of which each has four warps'."""
    sources, fragments = schedule.sources, layout.fragments
    whole = fragments if fragments >= sources else 4 * fragments
    if sources == 1 or whole % sources == 0:
        return None
    return (
        f"warp_split_k {schedule.warp_split_k}, cluster_split_k {schedule.cluster_split_k}, tile "
        f"{schedule.tile}: {sources} finish {fragments} fragments of 64 rows, which must go round; "
        "share k among fewer"
    )


def complete(
    arch: str, operation: MixedGemmOperation, fields: Mapping[str, Any]
) -> MixedGemmSchedule:
    """Make a schedule of `fields`; `stages: auto` becomes as many as fill shared memory."""
    if fields.get("stages", "auto") != "auto":
        return MixedGemmSchedule(**fields)
    schedule = MixedGemmSchedule(**{**fields, "stages": 2})
    layout = mixed_gemm_layout(operation, schedule)
    left = room(schedule) // 1024 * 1024 - layout.fixed_bytes
    stages = left // max(1, layout.stage_bytes + BARRIER_BYTES)
    return replace(schedule, stages=knobs(MixedGemmSchedule)["stages"].nearest(stages))

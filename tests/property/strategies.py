"""Legal operations, specs and problems, over every value that types and rules allow."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, get_args, get_type_hints

from hypothesis import assume
from hypothesis import strategies as st

from warploom.generator.architectures import ARCHITECTURES, architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import MOST_STEPS, STEPS, EpilogueStep, gate_of, legal
from warploom.generator.families import family
from warploom.generator.families._product import Batches
from warploom.generator.families._product import tiles as tile_count
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.gemm import (
    GemmOperation,
    GemmProblem,
    GemmSchedule,
)
from warploom.generator.families.gemm.rules import CLUSTERS
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec

GEMM, ATTENTION = family("gemm"), family("attention_forward")
ATTENTION_BACKWARD = family("attention_backward")
ATTENTION_LITERALS = ("element", "dim", "mask", "lengths")


_hints = cache(get_type_hints)  # texts, which are evaluated each time


def literal(source: type, field: str) -> st.SearchStrategy[Any]:
    """Any value of a field that is declared a Literal or a bool."""
    hint = _hints(source)[field]
    return st.booleans() if hint is bool else st.sampled_from(get_args(hint))


# Of each kind as often as of others, however many steps it has.
steps_of_a_kind = st.sampled_from(get_args(EpilogueStep)).flatmap(
    lambda kind: st.sampled_from([step for step in STEPS if isinstance(step, kind)])
)


@st.composite
def operations(draw: st.DrawFn) -> GemmOperation:
    """Any legal operation."""
    a = draw(literal(GemmOperation, "a"))
    k_major_only = element(a).bits == 8
    d = draw(literal(GemmOperation, "d"))
    assume(d != "int32" or a == "int8")
    steps = () if d == "int32" else tuple(draw(st.lists(steps_of_a_kind, max_size=MOST_STEPS)))
    assume(legal(steps) is None)
    return GemmOperation(
        a=a,
        b=draw(st.sampled_from(("e4m3", "e5m2"))) if element(a).is_fp8 else a,
        d=d,
        layout_a="row" if k_major_only else draw(literal(GemmOperation, "layout_a")),
        layout_b="col" if k_major_only else draw(literal(GemmOperation, "layout_b")),
        epilogue=steps,
        accumulation=draw(literal(GemmOperation, "accumulation")) if element(a).is_fp8 else "fast",
        batched=draw(literal(GemmOperation, "batched")),
    )


@st.composite
def gemm_specs(draw: st.DrawFn) -> KernelSpec:
    """Any legal GEMM: every field varies over all that its type and the rules allow."""
    arch, operation = draw(st.sampled_from(sorted(ARCHITECTURES))), draw(operations())
    drawn = (
        "raster",
        "store",
        "kernel_schedule",
        "consumers",
        "swap_ab",
        "producer_registers",
        "l2_promotion",
    )
    fields = {field: draw(literal(GemmSchedule, field)) for field in (*drawn, "stream_k")}
    fields["cluster_split_k"], fields["split_k"] = draw(st.sampled_from((1, 1, 1, 2, 3, 4, 8))), 1
    if fields["cluster_split_k"] == 1 and not fields["stream_k"]:
        fields["split_k"] = draw(st.sampled_from((1, 1, 1, 2, 3, 10, 32)))
    if fields["cluster_split_k"] > 1 or fields["stream_k"] or fields["split_k"] > 1:
        fields["kernel_schedule"] = "cooperative"
    if fields["kernel_schedule"] == "pingpong":
        fields["consumers"] = 2
    if fields["swap_ab"] and element(operation.d).bits != 16:
        fields["store"] = "direct"
    fields["tile"] = draw(tiles(operation, fields))
    fields["cluster"] = (1, 1) if fields["cluster_split_k"] > 1 else draw(st.sampled_from(CLUSTERS))
    if fields["consumers"] == 1 or fields["cluster"] != (1, 1) or fields["cluster_split_k"] > 1:
        fields["producer_registers"] = 40
    fields["swizzle_size"] = draw(st.integers(1, 1024))
    filled = GEMM.complete(arch, operation, fields)
    schedule = replace(filled, stages=draw(st.integers(2, filled.stages)))
    assume(not GEMM.reasons(architecture(arch), operation, schedule))
    return KernelSpec(arch, operation, schedule)


@st.composite
def attention_specs(draw: st.DrawFn) -> KernelSpec:
    """Any legal attention forward."""
    arch = draw(st.sampled_from(sorted(ARCHITECTURES)))
    operation = AttentionOperation(
        **{field: draw(literal(AttentionOperation, field)) for field in ATTENTION_LITERALS},
        softcap=draw(st.booleans()),
    )
    q_tile = draw(literal(AttentionSchedule, "q_tile"))
    overlap = draw(st.booleans())
    # Of what registers and shared memory may allow: few of all tiles do.
    widest = {64: 256, 128: 256, 192: 144}[q_tile] * 32 // max(32, operation.dim // 2)
    schedule = AttentionSchedule(
        q_tile=q_tile,
        kv_tile=16 * draw(st.integers(1, max(1, min(256, widest) // 16))),
        stages=draw(st.integers(2 if overlap else 1, 4)),
        overlap=overlap,
        pingpong=q_tile > 64 and draw(st.booleans()),
        scheduler=draw(literal(AttentionSchedule, "scheduler")),
    )
    assume(not ATTENTION.reasons(architecture(arch), operation, schedule))
    return KernelSpec(arch, operation, schedule)


@st.composite
def attention_backward_specs(draw: st.DrawFn) -> KernelSpec:
    """Any legal attention backward."""
    arch = draw(st.sampled_from(sorted(ARCHITECTURES)))
    operation = AttentionBackwardOperation(
        **{field: draw(literal(AttentionBackwardOperation, field)) for field in ATTENTION_LITERALS},
        softcap=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )
    wide = operation.dim > 128
    share = draw(literal(AttentionBackwardSchedule, "cluster_split")) if wide else "columns"
    overlap = draw(st.booleans())
    whole = wide or overlap or operation.softcap  # registers do not suffice for v as well
    schedule = AttentionBackwardSchedule(
        q_tile=draw(st.sampled_from((32, 48, 64, 64, 64, 80, 96, 112, 128))),
        kv_tile=128 if share == "rows" else draw(literal(AttentionBackwardSchedule, "kv_tile")),
        stages=draw(st.integers(1, 3)),
        overlap=overlap,
        accumulate="bulk" if operation.deterministic else draw(st.sampled_from(("bulk", "direct"))),
        cluster=1
        if operation.deterministic or share == "rows"
        else draw(literal(AttentionBackwardSchedule, "cluster")),
        cluster_split=share,
        single_do=draw(st.booleans()),
        v_in_registers="none"
        if whole
        else draw(literal(AttentionBackwardSchedule, "v_in_registers")),
    )
    assume(not ATTENTION_BACKWARD.reasons(architecture(arch), operation, schedule))
    return KernelSpec(arch, operation, schedule)


def specs() -> st.SearchStrategy[KernelSpec]:
    """Any legal spec of any family."""
    return st.one_of(gemm_specs(), attention_specs(), attention_backward_specs())


@st.composite
def tiles(
    draw: st.DrawFn, operation: GemmOperation, fields: dict[str, Any]
) -> tuple[int, int, int]:
    """A tile whose accumulators the registers can hold; not all of them are legal."""
    sharing = fields["consumers"] if fields["kernel_schedule"] == "cooperative" else 1
    rows = draw(st.sampled_from([rows for rows in (64, 128, 256) if rows % (64 * sharing) == 0]))
    promoted = 2 if operation.accumulation == "promoted" else 1
    wide = fields["swap_ab"] or element(operation.d).bits == 8
    unit = 16 if operation.a == "int8" or (wide and fields["store"] == "tma") else 8
    unit *= fields["cluster_split_k"]
    most = min(256, 192 * 128 * sharing // (rows * promoted))
    assume(unit <= most)
    columns = unit * draw(st.integers(1, most // unit))
    m, n = (columns, rows) if fields["swap_ab"] else (rows, columns)
    return m, n, 1024 // element(operation.a).bits


@st.composite
def problems(draw: st.DrawFn, spec: KernelSpec) -> GemmProblem:
    """Any problem that the runtime may hand to a kernel of `spec`: aligned as its TMA needs."""
    operation, schedule = spec.operation, spec.schedule
    assert isinstance(operation, GemmOperation)
    assert isinstance(schedule, GemmSchedule)
    extents = st.one_of(st.integers(1, 300), st.sampled_from((4096, 8191, 50_003)))
    m, n, k = draw(extents), draw(extents), draw(extents)
    d_unit = 16 // element(operation.d).bytes if schedule.store == "tma" else 1
    if gate_of(operation.epilogue) is not None:  # of both eights of columns
        d_unit = max(d_unit, 8) * 2
    n += -n % d_unit

    def pitch(extent: int, unit: int) -> int:
        return extent + -extent % unit + unit * draw(st.integers(0, 3))

    unit = 16 // element(operation.a).bytes
    pitch_a = pitch(k if operation.layout_a == "row" else m, unit)
    pitch_b = pitch(k if operation.layout_b == "col" else n, unit)
    problem = GemmProblem(
        *(m, n, k),
        *(pitch_a, pitch_b, pitch(n, d_unit)),
        pitch_c=tuple(n for step in operation.epilogue if step.pitched),
    )
    if not operation.batched:
        return problem
    own = draw(st.lists(st.integers(1, 64), min_size=1, max_size=2))
    rows_a = m if operation.layout_a == "row" else k
    rows_b = n if operation.layout_b == "col" else k
    fields = (step.batch_field(i) for i, step in enumerate(operation.epilogue))
    # Launches refuse more tiles in parts of k, and more blocks that add these up.
    each = max(schedule.split_k, schedule.tile[0] * schedule.tile[1] // 512)
    count = tile_count(schedule, problem) * schedule.multicast * prod(own)
    assume(count * (each if schedule.split_k > 1 else 1) <= LARGEST // 2)
    return replace(
        problem,
        batches=prod(own),
        batches_a=draw(lies(own, pitch_a * rows_a)),
        batches_b=draw(lies(own, pitch_b * rows_b)),
        batch_pitch_d=problem.pitch_d * m,
        batch_pitch_steps=tuple(draw(st.sampled_from((0, n))) for field in fields if field),
    )


def lies(own: list[int], pitch: int) -> st.SearchStrategy[Batches]:
    """How an operand lies that has all of D's batches, one, or those of one of its dimensions."""
    return st.sampled_from(
        (
            Batches(),
            Batches(prod(own), pitch),
            Batches(own[0], pitch, prod(own[1:])),
            Batches(own[-1], pitch),
        )
    )

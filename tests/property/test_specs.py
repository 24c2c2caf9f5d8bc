"""Whatever spec is legal renders, is named and packs consistently; what is not never constructs."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from warploom.errors import SpecificationError
from warploom.generator.architectures import ARCHITECTURES, architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import STEPS
from warploom.generator.families import FAMILIES
from warploom.generator.families.attention_forward import (
    AttentionOperation,
    AttentionSchedule,
    attention_layout,
)
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, gemm_layout
from warploom.generator.parameters import Kind
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec, parse_name

GEMM, ATTENTION = FAMILIES["gemm"], FAMILIES["attention_forward"]
NAME_LIMIT = 255 - len(".cubin")  # a file is named after the kernel
ATTENTION_LITERALS = ("element", "dim", "mask", "lengths")
ROLES = [
    (roles, consumers)
    for roles in get_args(get_type_hints(GemmSchedule)["roles"])
    for consumers in ((1, 2) if roles == "cooperative" else (2,))
]
few = settings(deadline=None, max_examples=60)
many = settings(few, max_examples=100)


def literal(source: type, field: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(get_type_hints(source)[field]))


@st.composite
def operations(draw: st.DrawFn) -> GemmOperation:
    a = draw(literal(GemmOperation, "a"))
    k_major_only = element(a).bits == 8
    d = draw(literal(GemmOperation, "d"))
    assume(d != "int32" or a == "int8")
    return GemmOperation(
        a=a,
        b=draw(st.sampled_from(("e4m3", "e5m2"))) if element(a).is_fp8 else a,
        d=d,
        layout_a="row" if k_major_only else draw(literal(GemmOperation, "layout_a")),
        layout_b="col" if k_major_only else draw(literal(GemmOperation, "layout_b")),
        epilogue=() if d == "int32" else tuple(draw(st.lists(st.sampled_from(STEPS), max_size=8))),
    )


@st.composite
def gemm_specs(draw: st.DrawFn) -> KernelSpec:
    """Any legal GEMM: every field varies over all that its type and the rules allow."""
    arch, operation = draw(st.sampled_from(sorted(ARCHITECTURES))), draw(operations())
    roles, consumers = draw(st.sampled_from(ROLES))
    sharing = consumers if roles == "cooperative" else 1
    m = draw(st.sampled_from([m for m in (64, 128, 256) if m % (64 * sharing) == 0]))
    fields = {
        "tile": (
            m,
            16 * draw(st.integers(1, min(16, 192 * 128 * sharing // m // 16))),
            1024 // element(operation.a).bits,
        ),
        "cluster": draw(st.sampled_from(((1, 1), (2, 1), (1, 2)))),
        "group": draw(st.integers(1, 1024)),
        "roles": roles,
        "consumers": consumers,
        **{field: draw(literal(GemmSchedule, field)) for field in ("raster", "store")},
    }
    filled = GEMM.complete(arch, operation, fields)
    schedule = replace(filled, stages=draw(st.integers(2, filled.stages)))
    if not element(operation.a).is_integer and draw(st.booleans()):
        narrower = (m, schedule.tile[1] - 8, schedule.tile[2])
        schedule = replace(schedule, tile=narrower)
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


def specs() -> st.SearchStrategy[KernelSpec]:
    """Any legal spec of any family."""
    return st.one_of(gemm_specs(), attention_specs())


@few
@given(specs())
def test_rendering_is_a_pure_function(spec: KernelSpec) -> None:
    copy = KernelSpec(spec.arch, replace(spec.operation), replace(spec.schedule))
    text = render(spec)
    assert text == render(copy)
    assert f" {spec.name}(const __grid_constant__ Parameters" in text


@many
@given(specs())
def test_a_name_is_an_identifier_that_fits_a_file_and_parses_back(spec: KernelSpec) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", spec.name)
    assert len(spec.name) <= NAME_LIMIT
    assert parse_name(spec.name) == spec


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.token)
def test_the_longest_epilogue_still_has_a_name_that_fits_a_file(step: Any) -> None:  # noqa: ANN401
    operation = GemmOperation("e4m3", "e4m3", "bf16", epilogue=(step,) * 8)
    schedule = GemmSchedule((128, 128, 128), 4, group=1024, store="direct")
    assert len(KernelSpec("sm_90a", operation, schedule).name) <= NAME_LIMIT


@many
@given(specs(), specs())
def test_the_digest_differs_exactly_where_a_field_does(one: KernelSpec, other: KernelSpec) -> None:
    assert (one.digest == other.digest) == (one == other)


@many
@given(specs(), st.data())
def test_the_digest_changes_with_any_one_field(spec: KernelSpec, data: st.DataObject) -> None:
    of_family = {"gemm": gemm_specs, "attention_forward": attention_specs}
    other = data.draw(of_family[spec.operation.family]())
    part = data.draw(st.sampled_from(("operation", "schedule")))
    old, new = getattr(spec, part), getattr(other, part)
    field = data.draw(st.sampled_from(sorted(old.__dataclass_fields__)))
    mutant = object.__new__(KernelSpec)  # a mutant need not be legal to have a digest
    for name in ("arch", "operation", "schedule"):
        object.__setattr__(mutant, name, getattr(spec, name))
    object.__setattr__(mutant, part, replace(old, **{field: getattr(new, field)}))
    assert (mutant.digest == spec.digest) == (getattr(old, field) == getattr(new, field))


@many
@given(specs(), st.data())
def test_parameters_are_aligned_disjoint_and_packed_at_their_offsets(
    spec: KernelSpec, data: st.DataObject
) -> None:
    parameters = FAMILIES[spec.operation.family].parameters(spec)
    end = 0
    for field in parameters.fields:
        alignment = 128 if field.kind is Kind.TENSOR_MAP else field.kind.size
        assert parameters.offsets[field.name] % alignment == 0
        assert parameters.offsets[field.name] >= end
        end = parameters.offsets[field.name] + field.kind.size
    assert 0 <= parameters.size - end < 128
    assert parameters.size % 128 == 0
    values = {field.name: data.draw(value_of(field.kind)) for field in parameters.fields}
    packed = parameters.pack(values)
    assert len(packed) == parameters.size
    for field in parameters.fields:
        offset = parameters.offsets[field.name]
        (unpacked,) = struct.unpack_from(f"<{field.kind.format}", packed, offset)
        assert unpacked == values[field.name]


def value_of(kind: Kind) -> st.SearchStrategy[Any]:
    return {
        Kind.TENSOR_MAP: st.binary(min_size=128, max_size=128),
        Kind.POINTER: st.integers(0, 2**64 - 1),
        Kind.INT64: st.integers(-(2**63), 2**63 - 1),
        Kind.INT32: st.integers(-(2**31), 2**31 - 1),
        Kind.FLOAT: st.floats(width=32, allow_nan=False),
    }[kind]


@many
@given(specs())
def test_the_declared_struct_is_the_one_that_is_packed(spec: KernelSpec) -> None:
    parameters, text = FAMILIES[spec.operation.family].parameters(spec), render(spec)
    assert f"sizeof(Parameters) == {parameters.size}" in text
    for field in parameters.fields:
        assert f"  {field.declaration};" in text
        assert f"OFFSET(Parameters, {field.name}) == {parameters.offsets[field.name]}" in text


@many
@given(specs())
def test_shared_memory_and_registers_fit_the_hardware(spec: KernelSpec) -> None:
    assert_fits(spec)


def assert_fits(spec: KernelSpec) -> None:
    """Assert the limits of the hardware, from scratch and not through the rules."""
    if isinstance(spec.operation, AttentionOperation):
        assert_attention_fits(spec)
        return
    operation, schedule = spec.operation, spec.schedule
    assert isinstance(operation, GemmOperation)
    assert isinstance(schedule, GemmSchedule)
    m, n, k = schedule.tile
    bits, d_bits = element(operation.a).bits, element(operation.d).bits
    stages = schedule.stages * ((m + n) * k * bits // 8 + 16)
    layout = gemm_layout(operation, schedule)
    span = layout.chunk_columns * d_bits // 8
    assert span in (16, 32, 64, 128) and n % layout.chunk_columns == 0
    staging = schedule.consumers * 2 * 64 * span
    used = stages + (staging if schedule.store == "tma" else 0)
    assert used <= layout.shared_bytes <= 232_448
    assert k * bits == 1024
    assert 8 <= n <= 256 and n % (16 if operation.a == "int8" and n > 24 else 8) == 0
    sharing = schedule.consumers if schedule.roles == "cooperative" else 1
    assert m % (64 * sharing) == 0
    assert m * n // (128 * sharing) <= 215


def assert_attention_fits(spec: KernelSpec) -> None:
    operation, schedule = spec.operation, spec.schedule
    assert isinstance(operation, AttentionOperation)
    assert isinstance(schedule, AttentionSchedule)
    q, kv = schedule.q_tile * operation.dim * 2, schedule.kv_tile * operation.dim * 2
    layout = attention_layout(architecture(spec.arch), operation, schedule)
    staging = q if layout.stages_o_apart else 0
    warpgroups = schedule.q_tile // 64
    barriers = 8 * (2 * warpgroups + 4 * schedule.stages) + 64 * warpgroups
    assert q + staging + 2 * schedule.stages * kv + barriers <= layout.shared_bytes <= 232_448
    assert schedule.kv_tile % 16 == 0
    assert 16 <= schedule.kv_tile <= 256
    # Scores, weights and output of a thread, of what setmaxnreg gives it.
    held = schedule.kv_tile // 2 + schedule.kv_tile // 4 + operation.dim // 2
    assert held <= {1: 227, 2: 212, 3: 132}[warpgroups]
    assert warpgroups > 1 or not schedule.pingpong


ATTENTION_BREAKS: dict[str, list[Any]] = {
    "q_tile": [-64, 0, 32, 96, 256],
    "kv_tile": [-16, 0, 8, 24, 264, 272, 512],
    "stages": [-1, 0, 9],
    "scheduler": ["", "greedy", "static; }"],
    "element": ["fp32", "int8", "bf16;"],
    "dim": [0, 8, 80, 512],
    "mask": ["", "alibi"],
    "lengths": ["ragged"],
    "softcap": [30.0, "yes"],
}
BREAKS: dict[str, list[Any]] = {
    "tile": [
        *((m, 128, 64) for m in (-64, 0, 32, 192, 512)),
        *((128, n, 64) for n in (-8, 0, 4, 12, 264)),
        *((128, 128, k) for k in (0, 16, 256)),
    ],
    "cluster": [(0, 1), (2, 2), (4, 1), (1, 3)],
    "consumers": [0, 3, -1],
    "stages": [-1, 0, 1, 33],
    "group": [0, -1, 1025],
    "raster": ["", "along_k", "along_m; }"],
    "store": ["", "tma2", "direct\n"],
    "roles": ["", "solo"],
    "a": ["fp32", "int4", "fp16;"],
    "d": ["e4m3", "int8", ""],
    "layout_a": ["", "rows"],
    "layout_b": ["colrow"],
    "epilogue": [(replace(STEPS[4], element="e4m3"),), (STEPS[0],) * 9],  # type: ignore[type-var]
}


@many
@given(specs(), st.data())
def test_a_legal_spec_with_one_illegal_field_never_constructs(
    spec: KernelSpec, data: st.DataObject
) -> None:
    breaks = BREAKS if spec.operation.family == "gemm" else ATTENTION_BREAKS
    field = data.draw(st.sampled_from(sorted(breaks)))
    value = data.draw(st.sampled_from(breaks[field]))
    operation, schedule = spec.operation, spec.schedule
    with pytest.raises(SpecificationError):
        if field in operation.__dataclass_fields__:
            KernelSpec(spec.arch, replace(operation, **{field: value}), schedule)  # type: ignore[type-var]
        else:
            KernelSpec(spec.arch, operation, replace(schedule, **{field: value}))  # type: ignore[type-var]


@many
@given(operations(), st.data())
def test_numbers_without_sense_construct_only_where_they_fit(
    operation: GemmOperation, data: st.DataObject
) -> None:
    wild = st.one_of(st.integers(-300, 300), st.sampled_from((8, 64, 96, 128, 176, 256)))
    schedule = GemmSchedule(
        tile=(data.draw(wild), data.draw(wild), data.draw(wild)),
        stages=data.draw(st.integers(-2, 40)),
        cluster=data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        consumers=data.draw(st.integers(0, 3)),  # type: ignore[arg-type]
        group=data.draw(st.integers(-2, 2000)),
    )
    try:
        spec = KernelSpec("sm_90a", operation, schedule)
    except SpecificationError:
        return
    assert_fits(spec)

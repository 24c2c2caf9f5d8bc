"""Whatever spec is legal renders, is named and packs consistently; what is not never constructs."""

from __future__ import annotations

import re
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    attention_backward_specs,
    attention_specs,
    gemm_specs,
    literal,
    operations,
    specs,
)

from warploom.errors import SpecificationError
from warploom.generator import names
from warploom.generator.architectures import architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import (
    GATES,
    MOST_STEPS,
    STEPS,
    ActivationGradient,
    MeanSquare,
    Preactivation,
    Quantize,
    RmsScale,
    Scale,
    Scatter,
    StochasticRounding,
    legal,
)
from warploom.generator.families import family
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
    attention_backward_layout,
)
from warploom.generator.families.attention_forward import (
    AttentionOperation,
    AttentionSchedule,
    attention_layout,
)
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, gemm_layout
from warploom.generator.parameters import Kind
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec, parse_name

NAME_LIMIT = 255 - len(".cubin")  # a file is named after the kernel
many = settings(deadline=None, max_examples=100)


@many
@given(specs(), st.data())
def test_what_is_legal_renders_has_a_name_packs_and_fits_the_hardware(
    spec: KernelSpec, data: st.DataObject
) -> None:
    """One sample for all: to draw legal specs takes longer than to look at them."""
    text = render(spec)
    assert text == render(KernelSpec(spec.arch, replace(spec.operation), replace(spec.schedule)))
    assert f" {spec.name}(const __grid_constant__ Parameters" in text
    assert_named(spec)
    assert_packed(spec, text, data)
    assert_fits(spec)


def assert_named(spec: KernelSpec) -> None:
    """Assert that a name is an identifier, fits a file and parses back, with defaults too."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", spec.name)
    assert parse_name(spec.name) == spec
    for suffix in ("cu", "cubin"):
        file = names.file(spec.name, suffix)
        assert len(file) <= 255 and file.endswith(f"_{spec.digest[:8]}.{suffix}")
        assert len(spec.name) > NAME_LIMIT or file == f"{spec.name}.{suffix}"
    # Version 0.1.0 printed names that show defaults.
    lead = f"{spec.operation.family}_{spec.architecture.token}"
    told = f"{names.full(spec.operation)}_{names.full(spec.schedule)}"
    assert parse_name(f"{lead}_{told}_{spec.digest[:8]}") == spec


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.token)
def test_the_longest_epilogue_still_has_a_name_that_fits_a_file(step: Any) -> None:  # noqa: ANN401
    is_quantized = isinstance(step, Quantize)
    types = ("e4m3", "e4m3", "e4m3" if is_quantized else "bf16")
    most = max(count for count in range(1, MOST_STEPS + 1) if legal((step,) * count) is None)
    steps = (step,) * most
    others: dict[str, Any] = {} if is_quantized else {"accumulation": "promoted", "batched": True}
    one_matrix = isinstance(step, StochasticRounding | MeanSquare | RmsScale | Scatter)
    others |= {"batched": False} if one_matrix else {}
    operation = GemmOperation(*types, epilogue=steps, **others)
    wordy: dict[str, Any] = {
        "swizzle_size": 1024,
        "store": "direct",
        "swap_ab": not is_quantized,
        "l2_promotion": 128,
    }
    clustered: dict[str, Any] = {"cluster": (2, 4)}
    if isinstance(step, GATES):  # of batches, whose producer has no registers for both
        clustered |= {"consumers": 1, "raster": "along_n"}
    for more in (clustered, {"producer_registers": 24}):  # which exclude each other
        fewer = step.loads or "consumers" in more
        columns = 128 if is_quantized else 16 if fewer else 112
        schedule = GemmSchedule((columns, 128, 128), 3, **wordy, **more)
        assert len(KernelSpec("sm_90a", operation, schedule).name) <= NAME_LIMIT


def test_a_name_too_long_for_a_file_is_cut_before_its_digits(tmp_path: Path) -> None:
    """`emit` failed on kernels of eight steps that add parts of k without an order."""
    steps = (*[Scale("host")] * 3, *[Scale("device")] * 2, Preactivation("fp16"))
    steps = (*steps, Preactivation("fp16"), ActivationGradient("gelu_tanh", "fp16"))
    operation = GemmOperation("e4m3", "e4m3", "fp32", "row", "col", steps, "promoted", batched=True)
    wordy: dict[str, Any] = {
        "swizzle_size": 1000,
        "store": "direct",
        "l2_promotion": 64,
        "swap_ab": True,
    }
    wordy |= {"raster": "along_n", "consumers": 1, "cluster_split_k": 2, "stream_k": True}
    schedule = GemmSchedule((16, 64, 128), 2, **wordy)
    spec = KernelSpec("sm_90a", operation, schedule)
    assert len(spec.name) > NAME_LIMIT
    path = tmp_path / names.file(spec.name, "cubin")
    path.write_bytes(b"")
    assert len(path.name) == 255 and path.stem.endswith(f"_{spec.digest[:8]}")


@many
@given(specs(), st.data())
def test_the_digest_differs_exactly_where_a_field_does(
    spec: KernelSpec, data: st.DataObject
) -> None:
    of_family = {
        "gemm": gemm_specs,
        "attention_forward": attention_specs,
        "attention_backward": attention_backward_specs,
    }
    other = data.draw(of_family[spec.operation.family]())
    assert (spec.digest == other.digest) == (spec == other)
    part = data.draw(st.sampled_from(("operation", "schedule")))
    old, new = getattr(spec, part), getattr(other, part)
    field = data.draw(st.sampled_from(sorted(old.__dataclass_fields__)))
    mutant = object.__new__(KernelSpec)  # a mutant need not be legal to have a digest
    for name in ("arch", "operation", "schedule"):
        object.__setattr__(mutant, name, getattr(spec, name))
    object.__setattr__(mutant, part, replace(old, **{field: getattr(new, field)}))
    assert (mutant.digest == spec.digest) == (getattr(old, field) == getattr(new, field))


def assert_packed(spec: KernelSpec, text: str, data: st.DataObject) -> None:
    """Assert that parameters are aligned, disjoint, declared in the text, and packed there."""
    parameters = family(spec.operation.family).parameters(spec)
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
    assert f"sizeof(Parameters) == {parameters.size}" in text
    for field in parameters.fields:
        offset = parameters.offsets[field.name]
        assert f"  {field.declaration};" in text
        assert f"OFFSET(Parameters, {field.name}) == {offset}" in text
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


def assert_fits(spec: KernelSpec) -> None:
    """Assert the limits of the hardware, from scratch and not through the rules."""
    if isinstance(spec.operation, AttentionOperation):
        assert_attention_fits(spec)
        return
    if isinstance(spec.operation, AttentionBackwardOperation):
        assert_attention_backward_fits(spec)
        return
    operation, schedule = spec.operation, spec.schedule
    assert isinstance(operation, GemmOperation)
    assert isinstance(schedule, GemmSchedule)
    m, n, k = schedule.tile
    rows, columns = (n, m) if schedule.swap_ab else (m, n)  # of wgmma
    bits = element(operation.a).bits
    assert k * bits == 1024
    assert 8 <= columns <= 256
    assert columns % (16 if operation.a == "int8" and columns > 24 else 8) == 0
    sharing = schedule.consumers if schedule.kernel_schedule == "cooperative" else 1
    assert rows % (64 * sharing) == 0
    promoted = 2 if operation.accumulation == "promoted" else 1
    assert promoted * rows * columns // (128 * sharing) <= 215
    layout = gemm_layout(operation, schedule)
    assert layout.chunk_columns % 8 == 0 and columns % layout.chunk_columns == 0
    if schedule.consumers == 2:  # what setmaxnreg shares out among three warpgroups
        assert schedule.producer_registers + 2 * layout.register_budget <= 3 * 168
        assert layout.register_budget % 8 == 0
    stages = schedule.stages * ((m + n) * k * bits // 8 + 16)
    assert stages + assert_staging_fits(operation, schedule) <= layout.shared_bytes <= 232_448


def assert_staging_fits(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Assert that D's staging is made of boxes that TMA stores; return its bytes.

    Where k is split into parts, a second launch has it, for one warpgroup.
    """
    if schedule.store == "direct":
        return 0
    layout = gemm_layout(operation, schedule)
    # Behind a gate D has a column for each two of the product.
    factors = 1 + any(isinstance(step, GATES) for step in operation.epilogue)
    lengths = (layout.chunk_columns // factors, 64)
    if schedule.swap_ab:
        lengths = (64 // factors, layout.chunk_columns)
    assert layout.store_box == lengths
    span = lengths[0] * element(operation.d).bits // 8
    assert span in (16, 32, 64, 128)
    assert all(schedule.tile[1 - i] % length == 0 for i, length in enumerate(lengths))
    one = 2 * lengths[1] * span
    if schedule.split_k > 1:
        assert one <= layout.reduction_bytes
        return 0
    return schedule.consumers * one


def assert_attention_fits(spec: KernelSpec) -> None:
    operation, schedule = spec.operation, spec.schedule
    assert isinstance(operation, AttentionOperation)
    assert isinstance(schedule, AttentionSchedule)
    q, kv = schedule.q_tile * operation.dim * 2, schedule.kv_tile * operation.dim * 2
    layout = attention_layout(architecture(spec.arch), operation, schedule)
    warpgroups = schedule.q_tile // 64
    barriers = 8 * (2 * warpgroups * layout.q_stages + 4 * schedule.stages)
    rest = barriers + 64 * warpgroups * layout.q_stages
    needed = layout.q_stages * q + 2 * schedule.stages * kv + rest
    assert needed <= layout.shared_bytes <= 232_448
    assert schedule.kv_tile % 16 == 0
    assert 16 <= schedule.kv_tile <= 256
    # Scores, weights and output of a thread, of what setmaxnreg gives it.
    held = schedule.kv_tile // 2 + schedule.kv_tile // 4 + operation.dim // 2
    assert held <= {1: 227, 2: 212, 3: 132}[warpgroups]
    assert warpgroups > 1 or not schedule.pingpong


def assert_attention_backward_fits(spec: KernelSpec) -> None:
    operation, schedule = spec.operation, spec.schedule
    assert isinstance(operation, AttentionBackwardOperation)
    assert isinstance(schedule, AttentionBackwardSchedule)
    layout = attention_backward_layout(architecture(spec.arch), operation, schedule)
    q, kv = schedule.q_tile * operation.dim * 2, schedule.kv_tile * operation.dim * 2
    ds, columns = schedule.q_tile * schedule.kv_tile * 2, min(128, operation.dim)
    shares_rows = schedule.cluster_split == "rows"
    if shares_rows:
        assert operation.dim > 128 and schedule.kv_tile == 128 and schedule.cluster == 1
        kv, ds = kv * 5 // 8, 2 * ds  # half of k and of v, a quarter of k more; two stages of p
    assert not schedule.single_do or schedule.stages > 1
    columns = {192: 96, 256: 128}.get(operation.dim, columns)
    sums = schedule.q_tile * columns * 4 if schedule.accumulate == "bulk" else 0
    barriers = 8 * (4 + 4 * schedule.stages) + 8 * 8 + 64
    tiles = schedule.stages + (1 if schedule.single_do else schedule.stages)
    statistics = 2 * 4 * schedule.q_tile * schedule.stages
    needed = 2 * kv + tiles * q + statistics + ds + sums + barriers
    assert needed <= layout.shared_bytes <= 232_448
    # dk, dv, p and dp of a thread, of what setmaxnreg gives it.
    rows = schedule.q_tile // (2 if shares_rows else 1)
    held = {"none": 0, "half": operation.dim // 8, "all": operation.dim // 4}[
        schedule.v_in_registers
    ]
    assert columns + rows + held <= {1: 227, 2: 232}[schedule.warpgroups]
    assert not held or (operation.dim <= 128 and not schedule.overlap and not operation.softcap)
    assert layout.blocks * layout.splits == schedule.warpgroups
    assert 32 <= layout.span <= 128
    assert operation.deterministic <= (schedule.accumulate == "bulk" and schedule.cluster == 1)
    # A cluster's blocks lay down one gradient in fp32 where k and v were, and share out its parts:
    # 16 rows by 8 columns each.
    assert schedule.kv_tile * columns * 4 <= 2 * kv
    assert schedule.kv_tile // 16 * (columns // 8) % schedule.cluster == 0


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
ATTENTION_BACKWARD_BREAKS: dict[str, list[Any]] = {
    **{field: ATTENTION_BREAKS[field] for field in ("element", "dim", "mask", "lengths")},
    **{field: ATTENTION_BREAKS[field] for field in ("stages", "softcap")},
    "q_tile": [-64, 0, 24, 256, 272],
    "kv_tile": [-64, 0, 32, 192],
    "accumulate": ["", "later", "bulk; }"],
    "cluster": [0, 3, 16, -1],
    "cluster_split": ["", "heads", "rows; }"],
    "single_do": [2, "yes"],
    "v_in_registers": ["", "some", "all; }"],
    "deterministic": ["yes", 2],
}
BREAKS: dict[str, list[Any]] = {
    "tile": [
        *((m, 128, 64) for m in (-64, 0, 512)),
        *((m, 96, 64) for m in (32, 192)),  # swapped, the rows are n: of 128 they would be legal
        *((128, n, 64) for n in (-8, 0, 4, 12, 264)),
        *((128, 128, k) for k in (0, 16, 256)),
    ],
    "cluster": [(0, 1), (4, 4), (16, 1), (1, 3)],
    "consumers": [0, 3, -1],
    "stages": [-1, 0, 1, 33],
    "swizzle_size": [0, -1, 1025],
    "cluster_split_k": [0, -1, 9],
    "raster": ["", "along_k", "along_m; }"],
    "store": ["", "tma2", "direct\n"],
    "kernel_schedule": ["", "solo"],
    "producer_registers": [0, 32, 41],
    "l2_promotion": [0, 32, 512],
    "a": ["fp32", "int4", "fp16;"],
    "d": ["int4", ""],
    "accumulation": ["", "slow"],
    "layout_a": ["", "rows"],
    "layout_b": ["colrow"],
    "epilogue": [(replace(STEPS[4], element="e4m3"),), (STEPS[0],) * 9],  # type: ignore[type-var]
}


@many
@given(specs(), st.data())
def test_a_legal_spec_with_one_illegal_field_never_constructs(
    spec: KernelSpec, data: st.DataObject
) -> None:
    breaks = {
        "gemm": BREAKS,
        "attention_forward": ATTENTION_BREAKS,
        "attention_backward": ATTENTION_BACKWARD_BREAKS,
    }[spec.operation.family]
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
        cluster=data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5))),
        consumers=data.draw(st.integers(0, 3)),  # type: ignore[arg-type]
        swizzle_size=data.draw(st.integers(-2, 2000)),
        swap_ab=data.draw(st.booleans()),
        store=data.draw(literal(GemmSchedule, "store")),
        cluster_split_k=data.draw(st.integers(-2, 10)),
    )
    numbers = {**asdict(schedule), "stages": "auto", "consumers": 2}
    family("gemm").complete("sm_90a", operation, numbers)  # of any there is a schedule
    try:
        spec = KernelSpec("sm_90a", operation, schedule)
    except SpecificationError:
        return
    assert_fits(spec)

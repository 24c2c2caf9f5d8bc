"""Every operation and shape gets a legal kernel from the table, and a given spec is checked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.architectures import architecture
from warploom.generator.epilogue import (
    GATES,
    LAST,
    MOST_STEPS,
    STEPS,
    Bias,
    ColumnSum,
    EpilogueStep,
    Gate,
    MeanSquare,
    Quantize,
    Residual,
    RmsScale,
    StochasticRounding,
    gate_of,
    legal,
    quantizes,
    rounds_stochastically,
)
from warploom.generator.families import family
from warploom.generator.families._product import tiles
from warploom.generator.families._product.table import waves
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.dispatch import choose, portfolio

CELLS = yaml.safe_load((Path(__file__).parents[3] / "benchmarks" / "cells.yaml").read_text())[
    "gemm"
]
GEMM = family("gemm")
H200 = DeviceLimits(multiprocessors=132)
OUTPUTS = ("fp16", "bf16", "fp32", "e4m3", "e5m2", "int8")
TYPES = [
    *((a, d) for a in ("fp16", "bf16", "e4m3", "e5m2", "int8") for d in OUTPUTS),
    ("int8", "int32"),
]
LAYOUTS = [(a, b) for a in ("row", "col") for b in ("row", "col")]
OF_ROWS = (MeanSquare, RmsScale)  # of one matrix


@st.composite
def operations(draw: st.DrawFn) -> GemmOperation:
    a, d = draw(st.sampled_from(TYPES))
    layout_a, layout_b = draw(st.sampled_from(LAYOUTS)) if a in ("fp16", "bf16") else LAYOUTS[1]
    steps = (
        () if d == "int32" else tuple(draw(st.lists(st.sampled_from(STEPS), max_size=MOST_STEPS)))
    )
    assume(legal(steps) is None)
    assume(gate_of(steps) is None or layout_b == "col")
    assume(not quantizes(steps))  # a schedule of its own: see below
    assume(all(d in step.results for step in steps if step.results))
    one_matrix = rounds_stochastically(steps) or any(isinstance(step, OF_ROWS) for step in steps)
    fp8 = a in ("e4m3", "e5m2")
    drawn = GemmOperation(
        *(a, draw(st.sampled_from(("e4m3", "e5m2"))) if fp8 else a, d),  # type: ignore[arg-type]
        *(layout_a, layout_b),  # type: ignore[arg-type]
        epilogue=steps,
        accumulation="fast" if a == "int8" else draw(st.sampled_from(("fast", "promoted"))),
        batched=draw(st.booleans()) and not one_matrix,
    )
    assume(not any(GEMM.operation_reasons(drawn)))
    return drawn


extents = st.one_of(st.integers(0, 300), st.sampled_from((4096, 8191, 65_536, 1_000_003)))


@settings(deadline=None, max_examples=200)
@given(operations(), extents, extents, extents, st.sampled_from(("tma", "direct")))
def test_no_legal_operation_is_without_a_kernel(
    operation: GemmOperation, m: int, n: int, k: int, store: str
) -> None:
    choice = choose(operation, GemmShape(m, n, k), device=H200, requires=store)
    assert choice.spec.operation == operation
    assert isinstance(choice.spec.schedule, GemmSchedule)
    # Which may have to store directly, as may a gate with many operands.
    by_tma = store == "tma" and not (choice.spec.schedule.swap_ab or gate_of(operation.epilogue))
    assert choice.spec.schedule.store == store or not by_tma
    described = family("gemm")
    architecture_ = architecture(choice.spec.arch)
    assert described.reasons(architecture_, operation, choice.spec.schedule) == []


@pytest.mark.usefixtures("rules_asked_once")
@pytest.mark.parametrize(("a", "d"), TYPES)
def test_every_measured_weight_has_a_kernel_at_every_m(a: str, d: str) -> None:
    operation = GemmOperation(a, a, d)  # type: ignore[arg-type]
    names = {
        choose(operation, GemmShape(m, n, k), device=H200, requires="tma").spec.name
        for n, k in CELLS["weights"]
        for m in (*CELLS["m"], *CELLS["ragged_m"])
    }
    assert 1 < len(names) < 30


def test_the_same_problem_gets_the_same_kernel() -> None:
    operation = GemmOperation("bf16", "bf16", "bf16")
    first = choose(operation, GemmShape(4095, 6144, 4096))
    assert choose(operation, GemmShape(4095, 6144, 4096)) == first


GIVEN = KernelSpec("sm_90a", GemmOperation("bf16", "bf16", "bf16"), GemmSchedule((128, 96, 64), 3))


def test_a_given_spec_is_the_one_that_runs() -> None:
    choice = choose(GIVEN.operation, GemmShape(5, 96, 16), spec=GIVEN, requires="tma")
    assert choice.spec is GIVEN


@pytest.mark.parametrize(
    "operation",
    [
        GemmOperation("bf16", "bf16", "fp32"),
        GemmOperation("fp16", "fp16", "bf16"),
        GemmOperation("bf16", "bf16", "bf16", layout_b="row"),
        GemmOperation("bf16", "bf16", "bf16", epilogue=(Bias("bf16"),)),
    ],
)
def test_a_spec_of_another_operation_is_refused(operation: GemmOperation) -> None:
    with pytest.raises(ProblemError, match=r"computes another operation.*leave spec out"):
        choose(operation, GemmShape(5, 96, 16), spec=GIVEN)


def test_a_spec_that_stores_by_tma_is_refused_where_d_is_not_for_tma() -> None:
    with pytest.raises(ProblemError, match=r"stores by TMA.*store: direct"):
        choose(GIVEN.operation, GemmShape(5, 96, 16), spec=GIVEN, requires="direct")


def test_batches_are_more_tiles() -> None:
    """A batch of small products is scheduled for what it is in all, not for one of them."""
    operation = GemmOperation("bf16", "bf16", "bf16", batched=True)

    def told(batches: int) -> tuple[float, int]:
        choice = choose(operation, GemmShape(512, 512, 512, batches), device=H200)
        schedule = choice.spec.schedule
        assert isinstance(schedule, GemmSchedule)
        made = waves(schedule, GemmShape(512, 512, 512, batches), H200)
        return made, tiles(schedule, GemmShape(512, 512, 512, batches))

    one, many = told(1), told(64)
    assert many[0] >= 64 * 512 * 512 // (132 * 256 * 256)
    assert many[1] % 64 == 0
    assert many[0] > one[0]


@pytest.mark.parametrize(
    ("m", "n", "k", "split"),
    [
        (1, 1280, 8192, 4),  # 14 tiles of 96 columns, of the 30 clusters that run at a time
        (1, 1280, 512, 1),  # nothing to share
        (1, 8192, 8192, 1),  # tiles enough
        (128, 4096, 14336, 2),
        (512, 1280, 8192, 2),
        (512, 8192, 8192, 1),
    ],
)
def test_blocks_share_a_long_k_where_tiles_are_few(m: int, n: int, k: int, split: int) -> None:
    operation = GemmOperation("bf16", "bf16", "bf16")
    choice = choose(operation, GemmShape(m, n, k), device=H200, requires="tma")
    assert isinstance(choice.spec.schedule, GemmSchedule)
    assert choice.spec.schedule.cluster_split_k == split


def test_a_schedule_that_can_be_stored_as_asked_comes_before_one_that_cannot() -> None:
    """Eight columns of 8 bits each are no rows for TMA, though fewer waves would speak for them."""
    operation = GemmOperation("bf16", "bf16", "e4m3")
    choice = choose(operation, GemmShape(1, 1280, 8192), requires="tma")
    assert isinstance(choice.spec.schedule, GemmSchedule)
    assert choice.spec.schedule.store == "tma"


def test_a_class_with_layouts_is_for_those_alone() -> None:
    def roles(a: str, b: str) -> str:
        operation = GemmOperation("bf16", "bf16", "bf16", a, b)  # type: ignore[arg-type]
        choice = choose(operation, GemmShape(4096, 4096, 4096), device=H200)
        assert isinstance(choice.spec.schedule, GemmSchedule)
        return choice.spec.schedule.kernel_schedule

    assert roles("col", "row") == roles("row", "row") == "cooperative"
    assert roles("row", "col") == roles("col", "col") == "pingpong"


@pytest.mark.parametrize("layout_a", ["row", "col"])
def test_the_model_chooses_what_was_swept_and_the_table_keeps_backward_products(
    layout_a: Literal["row", "col"],
) -> None:
    """Those were measured at full clocks, and no sweep had any of them: they must not be lost."""
    device, plain = DeviceLimits(132, "NVIDIA H200", "13.0"), GemmOperation("bf16", "bf16", "bf16")
    shape = GemmShape(3001, 5000, 1288)  # near no record
    listed = [*portfolio(plain, shape, device, "tma")]
    assert choose(plain, shape, device=device, requires="tma").spec in listed
    assert 30 < len(listed) <= 80  # each costs the first call of a shape 0.1 ms of the host's time
    backward = replace(plain, layout_a=layout_a, layout_b="row")
    found = choose(backward, shape, device=device, requires="tma")
    assert found.reason.startswith("default table: least waves * cost")
    assert found.spec.schedule.tile in ((128, 256, 64), (256, 128, 64))
    promoted = GemmOperation("e4m3", "e4m3", "bf16", accumulation="promoted")
    assert choose(promoted, shape, device=device).reason.startswith(
        "default table: least waves * cost"
    )


@pytest.mark.parametrize("scales", ["row_block", "row_row"])
def test_the_model_chooses_block_scaled_kernels_of_their_own(
    scales: Literal["row_block", "row_row"],
) -> None:
    device = DeviceLimits(132, "NVIDIA H200", "13.0")
    operation = GemmOperation("e4m3", "e4m3", "bf16", accumulation="promoted", block_scales=scales)
    plain = [*portfolio(GemmOperation("e4m3", "e4m3", "bf16"), GemmShape(1, 1, 1), device, "tma")]
    for m, (n, k) in itertools.product((1, 16, 128, 4096), CELLS["block_scaled"]["weights"]):
        shape = GemmShape(m, n, k)
        listed = [*portfolio(operation, shape, device, "tma")]
        assert 30 < len(listed) <= 100
        assert not {one.schedule for one in listed} >= {one.schedule for one in plain}
        found = dispatch.untuned(operation, shape, device, "tma")
        assert found.spec in listed and found.reason.startswith("cost model")
        schedule = found.spec.schedule
        assert isinstance(schedule, GemmSchedule)
        if n * k > 2**23 and m <= 16:  # nearly all SMs read a weight of more than 8 MB
            blocks = tiles(schedule, shape) * schedule.cluster_size * schedule.split_k
            assert blocks >= 88, schedule
        direct = dispatch.untuned(operation, shape, device, "direct").spec.schedule
        assert isinstance(direct, GemmSchedule) and direct.store == "direct"


def test_what_the_model_chooses_from_is_kept_of_some_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It grew with every epilogue that a process met."""
    monkeypatch.setattr(dispatch, "_PORTFOLIOS", 2)
    monkeypatch.setattr(dispatch, "_portfolios", kept := {})
    plain, shape = GemmOperation("bf16", "bf16", "bf16"), GemmShape(96, 640, 512)
    for steps in ((), (Bias("bf16"),), (Bias("fp32"),), ()):
        assert [*portfolio(replace(plain, epilogue=steps), shape, H200, "tma")]
    assert [operation.epilogue for operation, *_ in kept] == [(Bias("fp32"),), ()]


# ---- Epilogues that need the most registers ------------------------------------------------------

Kind = tuple[str, str, tuple[str, str], str]  # of A and B, of D, layouts, accumulation
KINDS: list[Kind] = [
    *((a, d, lay, "fast") for a in ("fp16", "bf16") for d in OUTPUTS for lay in LAYOUTS),
    *(
        (a, d, LAYOUTS[1], how)
        for a in ("e4m3", "e5m2")
        for d in OUTPUTS
        for how in ("fast", "promoted")
    ),
    *(("int8", d, LAYOUTS[1], "fast") for d in OUTPUTS),
]
EXTENTS = sorted({end for row in GEMM.table.classes if "m" in row for end in row["m"]})


def of_kind(
    kind: Kind, epilogue: tuple[EpilogueStep, ...], *, batched: bool = False
) -> GemmOperation:
    a, d, layouts, accumulation = kind
    made: Any = (a, a, d, *layouts)
    return GemmOperation(*made, epilogue=epilogue, accumulation=accumulation, batched=batched)  # type: ignore[arg-type]


def most_of(step: EpilogueStep) -> tuple[EpilogueStep, ...]:
    """As many of a step as an epilogue may have."""
    return max(((step,) * count for count in range(1, MOST_STEPS + 1)), key=_length)


def _length(steps: tuple[EpilogueStep, ...]) -> int:
    return len(steps) if legal(steps) is None else 0


def served(operation: GemmOperation, shape: GemmShape, store: str) -> KernelSpec:
    """The table's kernel of an operation, whatever the model of a GPU knows."""
    assert GEMM.operation_reasons(operation) == []
    return dispatch.tabled(operation, shape, H200, store).spec


@pytest.mark.usefixtures("rules_asked_once")
@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_table_has_a_kernel_of_every_class_for_the_largest_epilogue(
    kind: Kind, store: str
) -> None:
    """Promoted e4m3 had none with seven column sums, nor had products of a B that is row-major."""
    operation = of_kind(kind, most_of(ColumnSum()))
    for m in EXTENTS:
        for k in (0, 4096):
            assert served(operation, GemmShape(m, 640, k), store).operation == operation


@pytest.mark.usefixtures("rules_asked_once")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.token)
def test_the_table_has_a_kernel_for_the_most_of_each_step(step: EpilogueStep) -> None:
    kinds = [
        ("bf16", "bf16", ("col", "row"), "fast"),
        ("bf16", "fp32", ("row", "row"), "fast"),
        ("e4m3", "fp32", ("row", "col"), "promoted"),
    ]
    steps = most_of(step)
    if isinstance(step, LAST):
        return  # it is the last, and some are of other types: see below
    gated = isinstance(step, GATES)  # which sums no columns
    mixed = (*steps[:3], *most_of(Residual("fp32") if gated else ColumnSum())[:5])
    assert legal(mixed) is None
    for epilogue in (steps, mixed):
        for kind in kinds:
            if gated and kind[2][1] == "row":
                continue
            operation = of_kind(kind, epilogue)
            for m, store in itertools.product((8, 128, 129, 4096), ("tma", "direct")):
                served(operation, GemmShape(m, 640, 4096), store)


ROUNDED, SQUARED = StochasticRounding(), MeanSquare()


@st.composite
def crowded(draw: st.DrawFn) -> GemmOperation:
    """An operation whose epilogue has as many steps as there may be."""
    costly = st.sampled_from(
        [
            step
            for step in STEPS
            if step.registers(paired=False) > 1 and not isinstance(step, Quantize | MeanSquare)
        ]
    )
    steps = tuple(draw(st.lists(costly, min_size=5, max_size=MOST_STEPS)))
    while legal(steps) is not None:
        steps = steps[:-1]
    kind, last = draw(st.sampled_from(KINDS)), draw(st.sampled_from((None, ROUNDED, SQUARED)))
    if last and kind[1] in last.results and legal((*steps[:7], last)) is None:
        operation = of_kind(kind, (*steps[:7], last))
        if not GEMM.operation_reasons(operation):  # squares are not summed of every epilogue
            return operation
    of_rows = any(isinstance(step, OF_ROWS) for step in steps)
    return of_kind(kind, steps, batched=not of_rows and draw(st.booleans()))


@settings(deadline=None, max_examples=400)
@given(crowded(), st.sampled_from(EXTENTS), st.sampled_from(("tma", "direct")))
def test_the_table_has_a_kernel_for_every_crowded_epilogue(
    operation: GemmOperation, m: int, store: str
) -> None:
    served(operation, GemmShape(m, 640, 4096), store)


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(operations(), crowded()),
    st.sampled_from(EXTENTS),
    st.sampled_from((64, 8192)),
    st.sampled_from(("tma", "direct")),
)
def test_a_schedule_that_is_last_is_chosen_where_no_other_is_legal_and_nowhere_else(
    operation: GemmOperation, m: int, n: int, store: str
) -> None:
    """It would be fewer waves, or stored by TMA, where the others are not."""
    shape = GemmShape(m, n, 512)
    found = served(operation, shape, store)
    rows = GEMM.table.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            GEMM.table, "rows", lambda *given: (row for row in rows(*given) if not row.get("last"))
        )
        try:
            before = served(operation, shape, store)
        except SpecificationError:
            last = [tuple(row["tile"]) for row in rows(operation, shape) if row.get("last")]
            assert found.schedule.tile in last
        else:
            assert found == before


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("m", [8, 24, 48, 100, 200, 600, 4096])
def test_a_gate_of_groups_leaves_no_class_to_its_last_schedules(
    layout: Literal["halves", "interleaved"], m: int
) -> None:
    """Experts of many rows got tiles of 128x64, a third slower, once a cluster came first for them:
    a gate has no registers for two consumers in one.
    """
    kinds: list[Any] = [
        {"a": "bf16", "b": "bf16"},
        {"a": "e4m3", "b": "e4m3", "accumulation": "promoted", "block_scales": "row_block"},
        {"a": "e4m3", "b": "e4m3"},
    ]
    steps = (Bias("bf16"), Gate("swiglu_oai", layout))
    for fields in kinds:
        operation = GemmOperation(d="bf16", batched=True, groups="rows", epilogue=steps, **fields)
        shape = GemmShape(m, 4096, 4096, 32)
        made = [
            GEMM.table.kernel(row, operation, shape, "sm_90a", "tma")
            for row in GEMM.table.rows(operation, shape)
            if not row.get("last")
        ]
        assert any(made), fields


@st.composite
def quantized(draw: st.DrawFn) -> GemmOperation:
    """An operation whose D has a scale for each block, legal or not."""
    a = draw(st.sampled_from(("fp16", "bf16", "e4m3")))
    plain = st.sampled_from([step for step in STEPS if not isinstance(step, Quantize)])
    steps = (*draw(st.lists(plain, max_size=MOST_STEPS - 1)), draw(st.sampled_from(SCALED)))
    fast = a != "e4m3" or draw(st.booleans())
    assume(legal(steps) is None)
    fields: Any = {"accumulation": "fast" if fast else "promoted", "epilogue": steps}
    kinds: Any = (a, a, "e4m3")
    return replace(GemmOperation(*kinds), **fields)


SCALED = (Quantize("exact"), Quantize("pow2"))


@settings(deadline=None, max_examples=200)
@given(quantized(), st.sampled_from(EXTENTS), st.sampled_from(("tma", "direct")))
def test_every_legal_operation_with_scales_of_blocks_has_a_kernel(
    operation: GemmOperation, m: int, store: str
) -> None:
    assume(GEMM.operation_reasons(operation) == [])
    served(operation, GemmShape(m, 768, 512), store)

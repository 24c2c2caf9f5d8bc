"""Every operation and shape gets a legal kernel from the table, and a given spec is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import ProblemError
from warploom.generator.architectures import architecture
from warploom.generator.epilogue import STEPS, Bias
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmSchedule
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose

CELLS = yaml.safe_load((Path(__file__).parents[2] / "benchmarks" / "cells.yaml").read_text())[
    "gemm"
]
H200 = DeviceLimits(multiprocessors=132)
TYPES = [
    *((a, d) for a in ("fp16", "bf16", "e4m3", "int8") for d in ("fp16", "bf16", "fp32")),
    ("int8", "int32"),
]
LAYOUTS = [(a, b) for a in ("row", "col") for b in ("row", "col")]


def problem(m: int, n: int, k: int) -> GemmProblem:
    return GemmProblem(m, n, k, pitch_a=k, pitch_b=k, pitch_d=n)


@st.composite
def operations(draw: st.DrawFn) -> GemmOperation:
    a, d = draw(st.sampled_from(TYPES))
    layout_a, layout_b = draw(st.sampled_from(LAYOUTS)) if a in ("fp16", "bf16") else LAYOUTS[1]
    steps = () if d == "int32" else tuple(draw(st.lists(st.sampled_from(STEPS), max_size=8)))
    return GemmOperation(a, a, d, layout_a, layout_b, steps)  # type: ignore[arg-type]


extents = st.one_of(st.integers(0, 300), st.sampled_from((4096, 8191, 65_536, 1_000_003)))


@settings(deadline=None, max_examples=200)
@given(operations(), extents, extents, extents, st.sampled_from(("tma", "direct")))
def test_no_legal_operation_is_without_a_kernel(
    operation: GemmOperation, m: int, n: int, k: int, store: str
) -> None:
    choice = choose(operation, problem(m, n, k), store, None, H200)
    assert choice.spec.operation == operation
    assert isinstance(choice.spec.schedule, GemmSchedule)
    assert choice.spec.schedule.store == store
    described = family("gemm")
    architecture_ = architecture(choice.spec.arch)
    assert described.reasons(architecture_, operation, choice.spec.schedule) == []


@pytest.mark.parametrize(("a", "d"), TYPES)
def test_every_measured_weight_has_a_kernel_at_every_m(a: str, d: str) -> None:
    operation = GemmOperation(a, a, d)  # type: ignore[arg-type]
    names = {
        choose(operation, problem(m, n, k), "tma", None, H200).spec.name
        for n, k in CELLS["weights"]
        for m in (*CELLS["m"], *CELLS["ragged_m"])
    }
    assert 1 < len(names) < 30


def test_the_same_problem_gets_the_same_kernel() -> None:
    operation = GemmOperation("bf16", "bf16", "bf16")
    first = choose(operation, problem(4095, 6144, 4096), "tma", None, H200)
    assert choose(operation, problem(4095, 6144, 4096), "tma", None, H200) == first


GIVEN = KernelSpec("sm_90a", GemmOperation("bf16", "bf16", "bf16"), GemmSchedule((128, 96, 64), 3))


def test_a_given_spec_is_the_one_that_runs() -> None:
    choice = choose(GIVEN.operation, problem(5, 96, 16), "tma", GIVEN, H200)  # type: ignore[arg-type]
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
        choose(operation, problem(5, 96, 16), "tma", GIVEN, H200)


def test_a_spec_that_stores_by_tma_is_refused_where_d_is_not_for_tma() -> None:
    with pytest.raises(ProblemError, match=r"stores by TMA.*store: direct"):
        choose(GIVEN.operation, problem(5, 96, 16), "direct", GIVEN, H200)  # type: ignore[arg-type]


def test_a_class_with_layouts_is_for_those_alone() -> None:
    def roles(a: str, b: str) -> str:
        operation = GemmOperation("bf16", "bf16", "bf16", a, b)  # type: ignore[arg-type]
        problem = GemmProblem(4096, 4096, 4096, 4096, 4096, 4096)
        choice = choose(operation, problem, "tma", None, DeviceLimits(132))
        assert isinstance(choice.spec.schedule, GemmSchedule)
        return choice.spec.schedule.roles

    assert roles("col", "row") == "cooperative"
    assert roles("row", "col") == roles("row", "row") == roles("col", "col") == "pingpong"

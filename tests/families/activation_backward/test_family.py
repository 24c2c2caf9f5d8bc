"""What the generator says of the family: rules, launches, workspaces, text and registers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from precompiled import build_many, compiled

from warploom.cli import main
from warploom.errors import ProblemError, SpecificationError
from warploom.generator import build
from warploom.generator.families import family
from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardProblem,
    ActivationBackwardSchedule,
    ActivationBackwardShape,
)
from warploom.generator.launches import NO_GPU, Address, DeviceLimits
from warploom.generator.model import rank
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime import dispatch

FAMILY = family("activation_backward")
CONFIGS = Path(__file__).parents[3] / "configs" / "activation_backward"
NARROW, WIDE = ActivationBackwardSchedule(256, 64), ActivationBackwardSchedule(256, 256)


def spec(
    function: str = "gelu",
    schedule: ActivationBackwardSchedule = WIDE,
    kinds: tuple[str, str, str] = ("bf16", "bf16", "bf16"),
    *,
    sums: bool = True,
) -> KernelSpec:
    operation = ActivationBackwardOperation(*kinds, function, sums=sums)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, schedule)


# ---- Rules and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: spec("none", sums=False), "function none without sums: must be with sums"),
        (lambda: spec("none", kinds=("bf16", "fp32", "bf16")), "must be bf16 as dy is"),
        (lambda: spec(schedule=ActivationBackwardSchedule(512, 64, 1, 8)), "room for 2048 threads"),
        (lambda: spec(schedule=ActivationBackwardSchedule(256, 64, 4, 8)), "registers expected"),
        (lambda: spec("tanh"), "function 'tanh': must be one of none, relu"),
    ],
)
def test_what_is_not_legal_is_told(make: object, said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        make()  # type: ignore[operator]


def test_names_are_read_back() -> None:
    mixed = spec(kinds=("bf16", "fp32", "fp16"), schedule=ActivationBackwardSchedule(128, 64, 1, 8))
    assert mixed.name.startswith(
        "activation_backward_sm90a_bf16_fp32_fp16_gelu_sums_128x64_rows1_blocks8_"
    )
    assert spec().name.startswith("activation_backward_sm90a_bf16_gelu_sums_256x256_")
    for one in (mixed, spec(), spec("none"), *expand_file(CONFIGS / "space.yaml").specs[::97]):
        assert parse_name(one.name) == one


def test_every_operation_has_a_schedule() -> None:
    """Of the table, whose schedules must be legal for the widest types too."""
    kinds = ("fp16", "bf16", "fp32")
    for types in itertools.product(kinds, kinds, kinds):
        for function, sums in itertools.product(("relu", "gelu"), (False, True)):
            operation = ActivationBackwardOperation(*types, function, sums=sums)  # type: ignore[arg-type]
            for m, n in ((1, 4096), (8192, 4096), (100_000, 64)):
                dispatch.choose(operation, ActivationBackwardShape(m, n))


# ---- Launches ------------------------------------------------------------------------------------

EXTENTS = [(1, 1), (64, 4096), (257, 8), (1031, 520), (8192, 4096), (2048, 14_336), (100_000, 64)]


@pytest.mark.parametrize("schedule", [NARROW, WIDE, ActivationBackwardSchedule(128, 512, 1, 1)])
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_blocks_have_every_row_and_column_once_and_their_sums_have_room(
    schedule: ActivationBackwardSchedule, extents: tuple[int, int]
) -> None:
    kernel, problem = spec(schedule=schedule), ActivationBackwardProblem(*extents, *(9, 9, 9))
    m, n = extents
    room = sum(one.bytes for one in FAMILY.workspaces(kernel, problem))
    for multiprocessors in (1, 78, 132, 5000):
        first, *more = FAMILY.launches(kernel, problem, DeviceLimits(multiprocessors))
        told = first.parameters
        rows, strips, parts = (int(told[name]) for name in ("rows", "strips", "parts"))  # type: ignore[call-overload]
        assert first.grid == strips * parts
        assert (parts - 1) * rows < m <= parts * rows
        assert (strips - 1) * schedule.columns < n <= strips * schedule.columns
        assert rows % schedule.tile[0] == 0
        if parts == 1:
            assert more == [] and told["parts_sums"] == Address("sums")
        else:
            (adds,) = more
            assert told["parts_sums"] == Address("parts_sums") and 4 * parts * n <= room
            assert 32 * (adds.grid - 1) < n <= 32 * adds.grid


def test_large_calls_fill_a_gpu_once() -> None:
    """A second wave of a few blocks would take as long as the first."""
    for extents in ((8192, 4096), (2048, 14_336)):
        first, *_ = FAMILY.launches(spec(), ActivationBackwardProblem(*extents, 0), NO_GPU)
        assert 0.85 * 4 * 132 <= first.grid <= 4 * 132


def test_few_rows_are_one_launch() -> None:
    """Sums that no other block adds to are written where they belong."""
    problem = ActivationBackwardProblem(100, 4096, 4096, 4096, 4096)
    assert len(FAMILY.launches(spec(schedule=NARROW), problem, NO_GPU)) == 1
    assert FAMILY.workspaces(spec(schedule=NARROW), problem) == []
    assert FAMILY.workspaces(spec(sums=False), ActivationBackwardProblem(8192, 4096, 0)) == []


@pytest.mark.parametrize("extents", [(2**31 - 1, 8), (8, 2**31 - 1), (2**30, 2**20)], ids=str)
def test_what_takes_more_than_32_bits_is_refused(extents: tuple[int, int]) -> None:
    with pytest.raises(ProblemError, match="must be smaller"):
        FAMILY.launches(spec(), ActivationBackwardProblem(*extents, 0), NO_GPU)


# ---- Text, registers, model ----------------------------------------------------------------------


def test_a_kernel_has_what_its_operation_needs_alone() -> None:
    alone, plain = render(spec("none")), render(spec("relu", sums=False))
    assert "p.z" not in alone and "dz" not in alone and "Gradient" not in alone
    assert "_sums(" not in plain and "__shared__" not in plain and "logistic" not in plain
    assert "logistic2" in render(spec("silu")) and "_sums(" in render(spec("silu"))


def test_kernels_of_the_table_that_need_most_registers_do_not_spill() -> None:
    """64 registers for each of 1024 threads: what reads most of fp32 has none to spare."""
    wide = ("fp32", "fp32", "fp32")
    for kernel in (spec("gelu", WIDE, wide), spec("gelu_tanh", NARROW, wide)):
        assert all(one.clean for one in compiled(kernel).resources.values())


def test_the_model_has_large_blocks_of_columns_where_there_are_many() -> None:
    idle = spec(schedule=ActivationBackwardSchedule(256, 512, 1, 1))
    ranked = rank(None, [idle, spec(schedule=NARROW)], ActivationBackwardShape(100_000, 64), 132)
    assert ranked[0].spec.schedule == NARROW
    fast = rank(None, [spec()], ActivationBackwardShape(8192, 4096), 132)[0].seconds
    assert 4e-5 < fast < 8e-5


def test_kernels_are_chosen_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_many", build_many)
    arguments = ["compile", "activation_backward", "--shapes", "8192x4096", "--gpu", "h200"]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["clean"] for row in told["kernels"]] == [True] * 4

"""What the generator says of the family: rules, names, launches, text and registers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from precompiled import reports
from stand_ins import build_many

from warploom.cli import main
from warploom.errors import ProblemError, SpecificationError
from warploom.generator import build
from warploom.generator.families import family
from warploom.generator.families.cast import CastOperation, CastProblem, CastSchedule, CastShape
from warploom.generator.launches import NO_GPU, Address, DeviceLimits
from warploom.generator.model import rank
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec, parse_name
from warploom.generator.store import Store
from warploom.runtime import dispatch

FAMILY = family("cast")
CONFIGS = Path(__file__).parents[3] / "configs" / "cast"
TILE = CastSchedule(256)


def spec(
    block: str = "1x128", schedule: CastSchedule = TILE, x: str = "bf16", **options: Any
) -> KernelSpec:
    options = {"q": "e4m3", **options}
    return KernelSpec("sm_90a", CastOperation(x=x, block=block, **options), schedule)  # type: ignore[arg-type]


def problem(m: int, n: int) -> CastProblem:
    return CastProblem(m, n, n, n, (1, m), m, (1, n))


# ---- Rules and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: spec("1x64"), "block '1x64': must be one of tensor, row, 1x128"),
        (lambda: spec("1x32", q="int8"), "q int8 of block 1x32: must be e4m3 or e5m2"),
        (lambda: spec("1x32", static=True), "static with block 1x32: must be computed"),
        (lambda: spec("1x32", pow2=True), "pow2 with block 1x32: must be left out"),
        (lambda: spec(static=True, pow2=True), "pow2 with static: must be left out"),
        (lambda: spec(amax=True), "amax with block 1x128: must be tensor"),
        (lambda: spec("128x128", CastSchedule(128)), "threads 128, vectors 1 of a tile"),
        (lambda: spec(schedule=CastSchedule(256, 2), transpose=True), "vectors 2 of a tile"),
        (lambda: spec(schedule=CastSchedule(256, 1, "cta")), "reduce cta: must be warp"),
        (lambda: spec(x="e4m3"), "must be one of fp16, bf16, fp32"),
    ],
)
def test_what_is_not_legal_is_told(make: object, said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        make()  # type: ignore[operator]


def test_names_are_read_back() -> None:
    full = spec("tensor", transpose=True, amax=True, pow2=True, rounding="stochastic")
    assert full.name.startswith("cast_sm90a_bf16_e4m3_tensor_transpose_pow2_stochastic_amax_256x1_")
    smoke = expand_file(CONFIGS / "smoke.yaml").specs
    for one in (full, *smoke, *expand_file(CONFIGS / "space.yaml").specs):
        assert parse_name(one.name) == one


def test_every_operation_has_a_schedule() -> None:
    for block, q, static, transpose in itertools.product(
        ("tensor", "row", "1x128", "128x128", "1x32"),
        ("e4m3", "e5m2", "int8"),
        (False, True),
        (False, True),
    ):
        operation = CastOperation("fp32", q, block, static=static, transpose=transpose)  # type: ignore[arg-type]
        if FAMILY.operation_reasons(operation):
            continue
        for m, n in ((1, 4096), (8192, 256), (8192, 4096), (100_000, 64)):
            dispatch.choose(operation, CastShape(m, n))


# ---- Launches ------------------------------------------------------------------------------------

EXTENTS = [(1, 1), (128, 128), (129, 257), (16, 4096), (8192, 4096), (100_000, 64)]


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize(
    "kernel",
    [
        spec(),
        spec(schedule=CastSchedule(128, 4)),
        spec("tensor", CastSchedule(512, 2)),
        spec("128x128"),
        spec("tensor", transpose=True),
        spec("row"),
        spec("row", transpose=True),
        spec("row", CastSchedule(512, 1, "cta")),
    ],
    ids=lambda one: one.name,
)
def test_ctas_have_every_row_and_column_once(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    (m, n), schedule = extents, kernel.schedule
    across = -(-n // 128)
    for multiprocessors in (1, 132, 5000):
        device = DeviceLimits(multiprocessors)
        *before, launch = FAMILY.launches(kernel, problem(m, n), device)
        assert launch.parameters["across"] == across and launch.early
        body = kernel.operation.body  # type: ignore[attr-defined]
        if body == "tile":
            each, needed = 1, -(-m // 128) * across
        elif body == "row":
            each = schedule.threads // 32 if schedule.reduce == "warp" else 1  # type: ignore[attr-defined]
            needed = m
        else:
            each, needed = schedule.tile[0], m * across
        assert (launch.grid - 1) * each < needed <= launch.grid * each
        if before:
            (first,) = before
            assert first.parameters == launch.parameters and first.early
            if kernel.operation.block == "row":  # type: ignore[attr-defined]
                assert (first.entry, first.grid) == (f"{kernel.name}_factors", launch.grid)
            else:
                assert (
                    first.entry == f"{kernel.name}_amax" and 1 <= first.grid <= 8 * multiprocessors
                )


def test_a_tensors_largest_magnitude_is_left_as_zeros_by_the_launch_that_finds_it() -> None:
    """Other launches of the stream may come between the two: what is kept is zeros for them."""
    factor, peak = FAMILY.workspaces(spec("tensor"), problem(300, 300))
    assert (factor.tensor, factor.bytes, factor.kept) == ("factor", 4, False)
    assert (peak.tensor, peak.bytes, peak.kept) == ("peak", 8, True)
    _, launch = FAMILY.launches(spec("tensor"), problem(300, 300), NO_GPU)
    assert launch.parameters["peak"] == Address("peak")
    before, _, own = render(spec("tensor")).partition(f"{spec('tensor').name}(")
    assert "p.peak" in before and "p.peak" not in own
    factors, peaks, done = FAMILY.workspaces(spec("row", transpose=True), problem(300, 600))
    assert (factors.bytes, peaks.bytes, done.bytes) == (4 * 128 * 8, 4 * 128 * 30, 4 * 8)
    assert (factors.kept, peaks.kept, done.kept) == (False, False, True)
    for kernel in (spec(), spec("row"), spec("tensor", static=True)):
        assert FAMILY.workspaces(kernel, problem(300, 300)) == []
        assert len(FAMILY.launches(kernel, problem(300, 300), NO_GPU)) == 1


@pytest.mark.parametrize("extents", [(2**31 - 1, 8), (8, 2**31 - 1), (2**24, 2**17)], ids=str)
def test_what_takes_more_than_32_bits_is_refused(extents: tuple[int, int]) -> None:
    with pytest.raises(ProblemError, match="must be smaller"):
        FAMILY.launches(spec(), problem(*extents), NO_GPU)


# ---- Text, registers, model ----------------------------------------------------------------------


def test_a_kernel_has_what_its_operation_needs_alone() -> None:
    plain = render(spec(schedule=CastSchedule(256, 2)))
    assert "__shared__" not in plain and "philox" not in plain and "q_t" not in plain
    assert "scale_rows" in render(spec(transpose=True))
    assert "scale_rows" not in render(spec("128x128", transpose=True))
    assert "store_transposed" not in render(spec("128x128"))
    assert "_amax(" in render(spec("tensor")) and "_amax(" not in render(
        spec("tensor", static=True)
    )


def test_tiles_leave_room_for_several_ctas_of_an_sm() -> None:
    for x, block, ctas in (("bf16", "1x128", 3), ("bf16", "128x128", 4), ("fp32", "1x32", 2)):
        layout = FAMILY.layout(spec(block, x=x, transpose=True))
        assert layout.ctas_per_sm == ctas
        assert ctas * (layout.shared_bytes + 1024) <= 228 * 1024


def test_kernels_that_need_most_registers_do_not_spill(
    monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    """And those that are chosen ahead of time for a shape."""
    listed = [
        *chosen_ahead(monkeypatch),
        spec(x="fp32", transpose=True, rounding="stochastic"),
        spec(transpose=True, rounding="stochastic"),
        spec("128x128", transpose=True, rounding="stochastic"),
        spec("row", CastSchedule(512, 4, "cta"), "fp32", rounding="stochastic"),
        spec("row", x="fp16", q="int8", transpose=True, offsets=True),
        spec("1x128", x="fp16", transpose=True, offsets=True, rounding="stochastic"),
        spec(schedule=CastSchedule(512, 4), x="fp32", rounding="stochastic"),
    ]
    path = Path(__file__).with_suffix(".json")
    for name, one in reports(listed, path, renew=update_golden).items():
        assert name in one.resources
        assert all(entry.clean for entry in one.resources.values()), name


def test_the_model_knows_that_memory_limits_it() -> None:
    both = rank(None, [spec(transpose=True)], CastShape(8192, 8192), 132)[0].seconds
    assert 5e-5 < both < 9e-5
    rows = [spec("row", CastSchedule(256, 2, reduce)) for reduce in ("warp", "cta")]  # type: ignore[arg-type]
    assert rank(None, rows, CastShape(16, 16_384), 132)[0].spec == rows[1]


def chosen_ahead(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """The kernels that are compiled for a shape and a GPU that are named."""
    monkeypatch.setattr(build, "build_many", lambda specs, *_, **__: build_many(specs, Store(None)))
    arguments = ["compile", "cast", "--shapes", "8192x4096", "--gpu", "h200"]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    return [parse_name(row["name"]) for row in told["kernels"]]

"""The model: its arithmetic holds for what can be worked out by hand, and a fit finds constants."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from sweeps import GPU, MULTIPROCESSORS, entries

from warploom.cli import main
from warploom.errors import RecordsError
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.model import constants as files
from warploom.generator.model import fit as fits
from warploom.generator.model import gemm, predict, proposals, rank
from warploom.generator.model.attention import START as ATTENTION
from warploom.generator.model.attention import seconds as attention_seconds
from warploom.generator.model.constants import Constants, FamilyConstants, Quality
from warploom.generator.model.fit import Measurement, fit
from warploom.generator.model.gemm import START, Tiling, seconds, slowest
from warploom.generator.model.measurements import of_results
from warploom.generator.model.predict import MODELS
from warploom.generator.model.shapes import AttentionShape, GemmShape, distance
from warploom.generator.specification import KernelSpec
from warploom.tuning import search
from warploom.tuning.journal import measurements
from warploom.tuning.problems import Problem

BF16 = GemmOperation("bf16", "bf16", "bf16")
PINGPONG = GemmSchedule((128, 128, 64), 6, (2, 1), roles="pingpong")
COOPERATIVE = GemmSchedule((128, 256, 64), 4, (2, 1))
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def time(schedule: GemmSchedule, m: int, n: int, k: int, count: int = 132) -> float:
    return seconds(START, BF16, schedule, GemmShape(m, n, k), count)


# ---- GEMM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "shape", "waves", "bands"),
    [
        (PINGPONG, (4096, 4096, 64), 8, 2),  # 16 x 32 clusters on 66: 7.76 rounds; 16 / 8 bands
        (PINGPONG, (256, 128, 64), 1, 1),
        (PINGPONG, (257, 128, 64), 1, 1),  # one row more is one cluster more
        (replace(PINGPONG, cluster=(1, 1)), (128 * 133, 128, 64), 2, 17),  # one tile too many
        (replace(PINGPONG, cluster=(1, 1)), (128 * 132, 128, 64), 1, 17),
        (replace(PINGPONG, raster="along_n"), (4096, 4096, 64), 8, 4),
    ],
)
def test_waves_and_bands_are_those_of_the_kernels_scheduler(
    schedule: GemmSchedule, shape: tuple[int, int, int], waves: int, bands: int
) -> None:
    assert Tiling.of(schedule, GemmShape(*shape), 132) == Tiling(waves, bands)


def test_a_tail_costs_a_wave_and_no_more() -> None:
    full = replace(PINGPONG, cluster=(1, 1))
    one, tail = time(full, 128 * 12, 128 * 11, 8192), time(full, 128 * 12, 128 * 12, 8192)
    fixed = START["launch"] + START["latency"]
    assert (tail - fixed) / (one - fixed) == pytest.approx(2, rel=0.15)


def test_large_products_are_bound_by_the_tensor_core() -> None:
    flops = 2 * 8192**3 / time(COOPERATIVE, 8192, 8192, 8192)
    # 132 multiprocessors, 4096 operations a cycle (PTX ISA: m64n256k16 in 128 cycles).
    peak = 132 * 4096 * START["tensor_clock"]
    assert 0.75 * peak < flops < peak


def test_few_rows_are_bound_by_the_bytes_of_the_weight() -> None:
    small = GemmSchedule((64, 64, 64), 12, consumers=1)
    moved = 28672 * 4096 * 2
    floor = moved / START["hbm_bandwidth"]
    assert floor < time(small, 16, 28672, 4096) < 1.35 * floor


def test_eight_bits_take_half_of_the_bytes_and_of_the_products() -> None:
    wide = time(COOPERATIVE, 4096, 4096, 4096)
    e4m3 = GemmOperation("e4m3", "e4m3", "bf16")
    schedule = replace(COOPERATIVE, tile=(128, 256, 128))
    narrow = seconds(START, e4m3, schedule, GemmShape(4096, 4096, 4096), 132)
    assert 0.5 < narrow / wide < 0.65


def test_multicast_saves_traffic_of_l2_and_promotion_and_epilogues_cost() -> None:
    slow = {**START, "l2_bandwidth": 2e10}
    shape = GemmShape(8192, 8192, 8192)

    def at(schedule: GemmSchedule, operation: GemmOperation = BF16) -> float:
        return seconds(slow, operation, schedule, shape, 132)

    assert at(PINGPONG) < 0.8 * at(replace(PINGPONG, cluster=(1, 1)))
    e4m3 = GemmOperation("e4m3", "e4m3", "bf16")
    schedule = GemmSchedule((128, 128, 128), 6)
    assert at(schedule, replace(e4m3, accumulation="promoted")) > at(schedule, e4m3)
    # A cooperative tile's epilogue is exposed for each tile, pingpong's for the last.
    base, free = START, {**START, "epilogue": 1e-12, "store_bandwidth": 1e18}
    cost = {
        roles: seconds(base, BF16, schedule, shape, 132) - seconds(free, BF16, schedule, shape, 132)
        for roles, schedule in (("pingpong", PINGPONG), ("cooperative", COOPERATIVE))
    }
    assert cost["cooperative"] > 5 * cost["pingpong"] > 0


def test_what_l2_does_not_keep_is_read_once_for_each_band() -> None:
    schedule = replace(PINGPONG, group=4)
    shape = GemmShape(8192, 16384, 16384)
    a, b, d = (x * y * 2 for x, y in ((8192, 16384), (16384, 16384), (8192, 16384)))
    tiling = Tiling.of(schedule, shape, 132)
    assert tiling.bands == 8
    assert gemm._traffic(START, BF16, schedule, shape, tiling) == a + b + d + 7 * b
    kept = GemmShape(8192, 1024, 4096)  # 8 MB of B stay in L2
    once = 2 * (8192 * 4096 + 1024 * 4096 + 8192 * 1024)
    assert gemm._traffic(START, BF16, schedule, kept, Tiling.of(schedule, kept, 132)) == once


def test_empty_products_cost_a_launch() -> None:
    assert time(PINGPONG, 0, 128, 128) == time(PINGPONG, 128, 128, 0) == START["launch"]


def test_slowest_is_the_largest_where_one_is() -> None:
    assert slowest(1.0, 0.1) == pytest.approx(1.0, rel=1e-4)
    assert slowest(1.0, 1.0) == pytest.approx(2**0.25)


# ---- Attention -----------------------------------------------------------------------------------


def attention(shape: AttentionShape, mask: str = "none", **fields: object) -> float:
    operation = AttentionOperation("bf16", 128, mask)  # type: ignore[arg-type]
    schedule = AttentionSchedule(**{"q_tile": 128, "kv_tile": 128, **fields})  # type: ignore[arg-type]
    return attention_seconds(ATTENTION, operation, schedule, shape, 132)


def test_a_causal_mask_halves_long_sequences_and_a_window_bounds_them() -> None:
    long = AttentionShape(1, 16, 16, 16384, 16384, 128)
    assert 0.5 < attention(long, "causal") / attention(long) < 0.62
    windowed = replace(long, window=1024)
    twice = replace(long, seq_q=32768, seq_k=32768, window=1024)
    assert attention(windowed, "window") < 0.2 * attention(long, "causal")
    assert attention(twice, "window") / attention(windowed, "window") == pytest.approx(2, rel=0.05)


def test_attention_is_bound_by_products_and_exponentials() -> None:
    long = AttentionShape(1, 16, 16, 16384, 16384, 128)
    flops = 4 * 16 * 128 * 16384**2 / attention(long)
    assert 0.55 * 132 * 4096 * ATTENTION["tensor_clock"] < flops
    assert flops < 132 * 4096 * ATTENTION["tensor_clock"]
    assert attention(long, overlap=False) > 1.1 * attention(long)


def test_packed_sequences_count_their_rows_and_not_the_longest_of_all() -> None:
    packed = AttentionShape(32, 16, 16, 8192, 8192, 128, total_q=32768, total_k=32768)
    operation = AttentionOperation("bf16", 128, "causal", lengths="packed")
    schedule = AttentionSchedule(128, 128, scheduler="dynamic")
    found = attention_seconds(ATTENTION, operation, schedule, packed, 132)
    whole = attention(AttentionShape(32, 16, 16, 8192, 8192, 128), "causal", scheduler="dynamic")
    assert found < 0.1 * whole


# ---- Ranking -------------------------------------------------------------------------------------


def test_proposals_differ_in_what_the_model_can_tell(listed: list[Problem]) -> None:
    problem = listed[1]
    specs = [
        KernelSpec(one.arch, one.operation, replace(one.schedule, l2_promotion=bytes_))  # type: ignore[type-var]
        for one in problem.space
        for bytes_ in (128, 256)
    ]
    ranked = rank(None, specs, problem.shape, MULTIPROCESSORS)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    proposed = proposals(ranked, 12)
    assert len(proposed) == 12
    assert {one.schedule.l2_promotion for one in proposed} == {256}  # type: ignore[attr-defined]


def test_a_distance_is_of_ratios_and_has_bounds() -> None:
    one = GemmShape(512, 4096, 4096)
    assert distance(one, one) == 0
    assert distance(one, replace(one, m=1024)) == distance(one, replace(one, n=2048)) == 1
    assert distance(one, replace(one, m=2049)) == math.inf
    windowed = AttentionShape(1, 8, 8, 512, 512, 64, window=128)
    assert distance(windowed, replace(windowed, window=0)) == math.inf
    grouped = AttentionShape(1, 16, 4, 512, 512, 64)  # half the heads, and twice the sharing
    assert distance(grouped, replace(grouped, kv_heads=2)) == 2
    assert distance(grouped, replace(grouped, heads=32, kv_heads=8)) == 2
    assert distance(grouped, replace(grouped, heads=8, kv_heads=1)) < math.inf
    assert distance(grouped, replace(grouped, heads=32, kv_heads=1)) == math.inf


# ---- Fit and files -------------------------------------------------------------------------------


def measured(listed: list[Problem], roughness: float = 0.0) -> list[Measurement]:
    return measurements([e for problem in listed for e in entries(problem, roughness=roughness)])


@pytest.fixture
def small_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeps of these tests count as such."""
    monkeypatch.setattr(fits, "SWEPT", 50)


@pytest.mark.usefixtures("small_sweeps")
def test_a_fit_finds_the_constants_that_times_were_made_with(listed: list[Problem]) -> None:
    true = {**START, "tensor_clock": 1.1e9, "hbm_bandwidth": 2.9e12, "step": 4e-8}
    found = [
        replace(one, seconds=seconds(true, one.operation, one.schedule, one.shape, 132))  # type: ignore[arg-type]
        for one in measured(listed)
    ]
    family = fit(GPU, found).families["gemm"]
    assert family.error < 0.003
    assert family.values["tensor_clock"] == pytest.approx(1.1e9, rel=0.02)
    assert family.values["hbm_bandwidth"] == pytest.approx(2.9e12, rel=0.03)
    assert {"tensor_clock", "hbm_bandwidth"} & set(family.assumed) == set()
    assert {"promotion", "transposed", "integer"} <= set(family.assumed)  # nothing tells of them
    assert family.quality and family.quality.problems == 3
    assert family.quality.first < 1.02 and family.quality.kept == 1.0


@pytest.mark.usefixtures("small_sweeps")
def test_noise_that_no_model_knows_is_no_reason_to_follow_it(listed: list[Problem]) -> None:
    family = fit(GPU, measured(listed, roughness=0.1)).families["gemm"]
    assert 0.01 < family.error < 0.06
    assert family.quality and family.quality.first < 1.11


def test_what_a_search_measured_is_no_sweep(listed: list[Problem]) -> None:
    assert fits.SWEPT > search.FIRST + search.GENERATIONS * search.NEIGHBOURS + 1
    assert fit(GPU, measured(listed)).families["gemm"].quality is None


def counting(count: int) -> Callable[[object, object], int]:
    return lambda operation, shape: count if operation == BF16 else 0


def test_a_small_space_that_was_measured_nearly_whole_is_a_sweep(listed: list[Problem]) -> None:
    found = measured(listed)
    points = len({one.schedule for one in found if one.operation == BF16})
    for legal, problems in ((points, 3), (int(1.2 * points), None)):
        fitted = fit(GPU, found, legal=counting(legal)).families["gemm"].quality
        assert (fitted and fitted.problems) == problems


def test_a_model_decides_where_it_was_held_against_enough_and_is_good() -> None:
    assert Quality(28, 1.05, 0.95).decides
    assert not Quality(3, 1.0, 1.0).decides
    assert not Quality(28, 1.11, 0.95).decides
    assert not Quality(28, 1.05, 0.89).decides


def test_constants_come_back_from_their_file(tmp_path: Path) -> None:
    family = FamilyConstants({"launch": 2e-6}, 9, 3, 0.02, ("launch",), Quality(5, 1.02, 1.0))
    constants = Constants(GPU, 132, {"gemm": family, "x": replace(family, quality=None)})
    path = tmp_path / "constants.json"
    path.write_text(files.text(constants))
    assert files.read(path) == constants


@pytest.mark.parametrize("damage", ['{"schema": 2}', "{", '{"schema": 1}', "[]"])
def test_damaged_constants_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "constants.json"
    path.write_text(damage)
    with pytest.raises(RecordsError, match="constants"):
        files.read(path)


def test_shipped_constants_have_every_name_of_their_model_and_are_near_what_was_measured() -> None:
    shipped = files.load(GPU)
    assert shipped and not shipped.stand_in
    for name, family in shipped.families.items():
        assert family.values.keys() == MODELS[name][0].keys()
    errors: dict[str, list[float]] = {"gemm": [], "attention_forward": []}
    for path in (RESULTS / "gemm_llm_bf16.json", RESULTS / "attention_forward.json"):
        for one in of_results(path)[1]:
            spec = KernelSpec("sm_90a", one.operation, one.schedule)
            predicted = predict(shipped, spec, one.shape, one.multiprocessors)
            assert predicted
            errors[one.operation.family].append(abs(math.log(predicted / one.seconds)))
    for found in errors.values():
        assert len(found) >= 30
        assert sorted(found)[len(found) // 2] < 0.10


def test_a_gpu_without_constants_gets_a_stand_in_that_decides_nothing() -> None:
    found = files.load("NVIDIA GH200 480GB")
    assert found and found.stand_in == GPU


@pytest.mark.usefixtures("small_sweeps")
def test_the_command_fits_journals_and_results(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "constants.json"
    sources = [str(sweep), str(RESULTS / "attention_forward.json")]
    done = CliRunner().invoke(main, ["records", "fit", *sources, "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["gpu"] == GPU
    assert document["families"]["gemm"]["quality"]["problems"] == 3
    assert document["families"]["attention_forward"]["quality"] is None
    for bad, told in ((tmp_path / "none.json", "No such file"), (sweep.parent, "directory")):
        done = CliRunner().invoke(main, ["records", "fit", str(bad)])
        assert done.exit_code == 1 and told.lower() in done.stderr.lower()

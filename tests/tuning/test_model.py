"""The model: attention worked out by hand, ranking, and that a fit finds constants."""

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
from warploom.generator import families
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.attention_forward.model import START as ATTENTION
from warploom.generator.families.attention_forward.model import seconds as attention_seconds
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.families.gemm.model import START, seconds
from warploom.generator.model import constants as files
from warploom.generator.model import fit as fits
from warploom.generator.model import predict, proposals, rank
from warploom.generator.model.constants import Constants, FamilyConstants, Quality
from warploom.generator.model.fit import Measurement, fit
from warploom.generator.model.measurements import of_results
from warploom.generator.shapes import distance
from warploom.generator.specification import KernelSpec
from warploom.tuning import search
from warploom.tuning.journal import Journal, measurements
from warploom.tuning.problems import Problem

BF16 = GemmOperation("bf16", "bf16", "bf16")
ALONE = 5e-5  # seconds: the model's launch is one alone, which takes 4 us more than one of a graph
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


# ---- Attention -----------------------------------------------------------------------------------


def attention(shape: AttentionShape, mask: str = "none", **fields: object) -> float:
    operation = AttentionOperation("bf16", 128, mask)  # type: ignore[arg-type]
    schedule = AttentionSchedule(**{"q_tile": 128, "kv_tile": 128, **fields})  # type: ignore[arg-type]
    return attention_seconds(ATTENTION, operation, schedule, shape, 132)


def test_a_causal_mask_halves_long_sequences_and_a_window_bounds_them() -> None:
    long = AttentionShape(1, 33, 33, 16384, 16384, 128)  # tiles fill whole rounds of 132
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
        KernelSpec(one.arch, one.operation, replace(one.schedule, raster=raster))  # type: ignore[type-var]
        for one in problem.space
        for raster in ("along_n", "along_m")
    ]
    ranked = rank(None, specs, problem.shape, MULTIPROCESSORS)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    proposed = proposals(ranked, 12)
    assert len(proposed) == 12
    assert {one.schedule.raster for one in proposed} == {"along_m"}  # type: ignore[attr-defined]


def test_proposals_differ_in_more_than_details(listed: list[Problem]) -> None:
    """Else four of twelve may be one tile, which L2 promotion and raster tell apart."""
    problem = listed[1]
    specs = [
        KernelSpec(one.arch, one.operation, replace(one.schedule, l2_promotion=bytes))  # type: ignore[type-var]
        for one in problem.space
        for bytes in (256, 128)
    ]
    proposed = proposals(rank(None, specs, problem.shape, MULTIPROCESSORS), 12)
    usual = {replace(one.schedule, l2_promotion=256, raster="along_m") for one in proposed}  # type: ignore[type-var]
    assert len(usual) == len(proposed) == 12


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
    """A third of each sweep: more times of three problems than there are constants."""
    swept = (entries(problem, roughness=roughness)[::3] for problem in listed)
    return measurements([entry for some in swept for entry in some])


def unseen(found: list[Measurement]) -> list[Measurement]:
    """The same times, as if of problems that differ by a row of B, which changes no tile."""
    return [replace(one, shape=replace(one.shape, n=one.shape.n + 8)) for one in found]  # type: ignore[call-arg]


@pytest.fixture
def small_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeps of these tests count as such."""
    monkeypatch.setattr(fits, "SWEPT", 20)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit ends after two steps: of tests that ask for something else than its constants."""
    monkeypatch.setattr(fits, "ROUNDS", 2)


@pytest.mark.usefixtures("small_sweeps")
def test_a_fit_finds_the_constants_that_times_were_made_with(listed: list[Problem]) -> None:
    true = {**START, "tensor_clock": 1.1e9, "hbm_bandwidth": 2.9e12, "step": 4e-8}
    found = [
        replace(one, seconds=seconds(true, one.operation, one.schedule, one.shape, 132))  # type: ignore[arg-type]
        for one in measured(listed)
    ]
    family = fit(GPU, found, unseen=unseen(found)).families["gemm"]
    assert family.error < 0.007
    assert family.values["tensor_clock"] == pytest.approx(1.1e9, rel=0.02)
    assert family.values["hbm_bandwidth"] == pytest.approx(2.9e12, rel=0.03)
    assert {"tensor_clock", "hbm_bandwidth"} & set(family.assumed) == set()
    assert {"promotion", "transposed", "integer"} <= set(family.assumed)  # nothing tells of them
    assert family.quality and family.quality.problems == 3
    assert family.quality.first < 1.02 and family.quality.kept == 1.0


@pytest.mark.usefixtures("small_sweeps")
def test_noise_that_no_model_knows_is_no_reason_to_follow_it(listed: list[Problem]) -> None:
    found = measured(listed, roughness=0.1)
    family = fit(GPU, found, unseen=unseen(found)).families["gemm"]
    assert 0.01 < family.error < 0.06
    assert family.quality and family.quality.first < 1.11


def test_the_fast_ones_of_a_problem_count_for_more(listed: list[Problem]) -> None:
    group = [one for one in measured(listed) if one.shape == listed[0].shape]
    best = min(one.seconds for one in group)
    weights = fits._weights([replace(group[0], seconds=best * by) for by in (1, 1.15, 1.3, 5)])
    assert list(weights) == pytest.approx([1, math.exp(-1), math.exp(-2), fits.LEAST])


@pytest.mark.usefixtures("begun")
def test_what_a_search_measured_is_no_sweep(listed: list[Problem]) -> None:
    assert fits.SWEPT > search.FIRST + search.GENERATIONS * search.NEIGHBOURS + 1
    found = measured(listed)
    assert fit(GPU, found, unseen=unseen(found)).families["gemm"].quality is None


@pytest.mark.usefixtures("small_sweeps", "begun")
def test_a_model_is_held_against_problems_that_it_has_not_seen_alone(
    listed: list[Problem],
) -> None:
    """Held against what it was fitted to, it chose 2.7 % behind; of drawn products, 12 %."""
    found = measured(listed)
    assert fit(GPU, found).families["gemm"].quality is None
    with pytest.raises(RecordsError, match="must not be fitted to"):
        fit(GPU, found, unseen=found[:1])


def counting(count: int) -> Callable[[object, object], int]:
    return lambda operation, shape: count if operation == BF16 else 0


@pytest.mark.usefixtures("begun")
def test_a_small_space_that_was_measured_nearly_whole_is_a_sweep(listed: list[Problem]) -> None:
    found = measured(listed)
    points = len({one.schedule for one in found if one.operation == BF16})
    for legal, problems in ((points, 3), (int(1.2 * points), None)):
        worth = fit(GPU, found, legal=counting(legal), unseen=unseen(found))
        fitted = worth.families["gemm"].quality
        assert (fitted and fitted.problems) == problems


def test_a_model_decides_where_it_was_held_against_enough_and_is_good() -> None:
    assert Quality(28, 1.04, 0.95).decides
    assert not Quality(19, 1.0, 1.0).decides
    assert not Quality(28, 1.05, 0.95).decides
    assert not Quality(28, 1.04, 0.89).decides


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


@pytest.mark.parametrize("read", [files.read, of_results])
@pytest.mark.parametrize(
    ("content", "told"), [(None, "No such file or directory"), ("{}", "no '(schema|machine)'")]
)
def test_what_is_wrong_with_a_file_is_said_once_and_names_the_field_that_it_lacks(
    read: Callable[[Path], object], content: str | None, told: str, tmp_path: Path
) -> None:
    """A missing field was "'schema'" alone, and each reader worded reasons for itself."""
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecordsError, match=told) as caught:
        read(path)
    assert str(caught.value).count(path.name) == 1


def test_shipped_constants_have_every_name_of_their_model_and_are_near_what_was_measured() -> None:
    shipped = files.shipped(GPU)
    assert shipped and not any(one.fitted_on for one in shipped.families.values())
    for name, fitted in shipped.families.items():
        assert fitted.values.keys() == families.family(name).constants.keys()
    errors: dict[str, list[float]] = {name: [] for name in shipped.families}
    for path in (RESULTS / "bench_gemm_bf16.json", RESULTS / "bench_attention.json"):
        for one in of_results(path)[1]:
            spec = KernelSpec("sm_90a", one.operation, one.schedule)
            predicted = predict(shipped, spec, one.shape, one.multiprocessors)
            assert predicted
            if one.operation.family == "gemm" and one.seconds < ALONE:
                continue
            errors[one.operation.family].append(abs(math.log(predicted / one.seconds)))
    for found in errors.values():
        assert len(found) >= 30
        assert sorted(found)[len(found) // 2] < 0.10


@pytest.mark.usefixtures("small_sweeps", "begun")
def test_the_command_fits_journals_and_results(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "constants.json"
    unmeasured = Journal(
        tmp_path / "unmeasured.jsonl"
    )  # of a run that ended before its first batch
    unmeasured.close()
    sources = [str(sweep), str(unmeasured.path), str(RESULTS / "bench_attention.json")]
    done = CliRunner().invoke(main, ["records", "fit", *sources, "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["gpu"] == GPU
    assert document["families"]["gemm"]["quality"] is None
    assert document["families"]["attention_forward"]["quality"] is None
    before = out.read_text().replace(GPU, "NVIDIA H100 80GB HBM3")  # which a fit replaced
    other = tmp_path / "same_file_of_another_kind.json"
    other.write_text(before)
    done = CliRunner().invoke(main, ["records", "fit", *sources, "--out", str(other)])
    assert done.exit_code == 1 and "constants of NVIDIA H100" in done.stderr, done.stderr
    assert other.read_text() == before
    done = CliRunner().invoke(main, ["records", "fit", str(unmeasured.path)])
    assert done.exit_code == 1 and "no measurement of a correct kernel" in done.stderr
    same = CliRunner().invoke(main, ["records", "fit", str(sweep), "--unseen", str(sweep)])
    assert same.exit_code and "must not be fitted to" in same.stderr
    for bad, told in ((tmp_path / "none.json", "No such file"), (sweep.parent, "directory")):
        done = CliRunner().invoke(main, ["records", "fit", str(bad)])
        assert done.exit_code == 1 and told.lower() in done.stderr.lower()


@pytest.mark.usefixtures("small_sweeps", "begun")
def test_the_command_leaves_out_kernels_that_are_not_legal_and_says_how_many(
    sweep: Path, tmp_path: Path
) -> None:
    """One such schedule, of another version or tampered with, ended a fit by a division by 0."""
    first, *lines = sweep.read_text().splitlines()
    own = [line for line in lines if '"outcome": "correct"' in line]
    entry = json.loads(own[-1])
    entry["schedule"]["stages"] = 0
    odd = tmp_path / "tuned.journal"  # a journal is known by its content, not by its name
    odd.write_text("\n".join([first, *own, json.dumps(entry), ""]))
    done = CliRunner().invoke(main, ["records", "fit", str(odd), "--json"])
    assert done.exit_code == 0, done.stderr
    assert f"1 of {len(own) + 1} measurements" in done.stderr
    assert [row["measurements"] for row in json.loads(done.stdout)["fit"]] == [len(own)]

"""A GPU kind without records and constants takes another's, rescaled, and never as its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from decisions import PINGPONG, PLAIN, SLIM, WIDE, record

import warploom
from warploom.cli import main
from warploom.errors import ConfigurationError
from warploom.generator import families, records_file
from warploom.generator.families.gemm import GemmShape
from warploom.generator.families.mixed_gemm import MixedGemmOperation, MixedGemmShape
from warploom.generator.gpus import DEFAULT, KINDS, distance, file_name, kind, lenders
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import load, predict, rescaled, shipped
from warploom.generator.records import Record, Records, Timed
from warploom.generator.specification import KernelSpec
from warploom.generator.targets import target
from warploom.runtime import dispatch, records
from warploom.tuning.autotune.api import autotune
from warploom.tuning.autotune.keeping import Keeping
from warploom.tuning.autotune.problem import Problem
from warploom.tuning.problems import Problem as Tuned
from warploom.tuning.searches import searched

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
ROWS = (16, 28672, 4096)  # bound by memory, and recorded on the H200
SQUARE = (8192, 4096, 4096)  # bound by the tensor cores, likewise


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of records beside those of the package, of which the H200's alone count."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path))
    came = records_file.shipped
    monkeypatch.setattr(records_file, "shipped", lambda gpu: came(gpu) if gpu == H200 else None)
    records.forget()
    yield tmp_path
    records.forget()


def choose(gpu: str, extents: tuple[int, int, int], **more: object) -> dispatch.Choice:
    device = target(gpu)
    fields = {"operation": PLAIN, "requires": "tma", "device": device, **more}
    return dispatch.choose(shape=GemmShape(*extents), **fields)  # type: ignore[arg-type]


def keep(folder: Path, gpu: str, *listed: Record) -> None:
    """Have a user's file of a GPU kind with records that were measured there."""
    here = replace(listed[0].environment, gpu=gpu, multiprocessors=kind(gpu).multiprocessors)
    own = [replace(one, environment=here) for one in listed]
    records_file.update(folder / file_name(gpu), gpu, own)
    records.forget()


# ---- Which kind lends, and what ------------------------------------------------------------------


def test_the_nearest_kind_is_the_one_with_the_most_alike_figures() -> None:
    assert lenders("NVIDIA H100 PCIe")[0].name == "NVIDIA H100 80GB HBM2e"
    assert lenders("NVIDIA H20")[0].name == "NVIDIA H20-3e"
    assert H100 in [one.name for one in lenders("NVIDIA H800")][:2]
    for name, row in KINDS.items():
        others = lenders(name)
        assert name not in [one.name for one in others] and len(others) == len(KINDS) - 1
        assert distance(row, row) == 0
        assert distance(row, DEFAULT) == pytest.approx(distance(DEFAULT, row))
    assert distance(kind(H100), kind(H200)) < dispatch.CLOSE


@pytest.mark.parametrize("gpu", ["NVIDIA H20", H100, "NVIDIA H100 PCIe"])
def test_constants_are_rescaled_by_tensor_rate_bandwidth_and_sms(gpu: str) -> None:
    lent, own, row = load(gpu), shipped(H200), kind(gpu)
    assert lent and own and lent.multiprocessors == row.multiprocessors
    assert {one.fitted_on for one in lent.families.values()} == {H200}
    for name, fitted in lent.families.items():
        was = own.families[name].values
        assert fitted.values["tensor_clock"] / was["tensor_clock"] == pytest.approx(
            row.flops[16] / row.multiprocessors / (DEFAULT.flops[16] / DEFAULT.multiprocessors)
        )
        assert fitted.values["hbm_bandwidth"] / was["hbm_bandwidth"] == pytest.approx(
            row.bytes_per_second / DEFAULT.bytes_per_second
        )
        assert fitted.values["launch"] == was["launch"]
        assert fitted.quality == own.families[name].quality
    assert shipped(gpu) is None and load(H200) == own
    assert load(H200, own=False) is None  # nobody else has constants


@pytest.mark.parametrize("family", families.names())
def test_every_bandwidth_of_a_model_that_memory_or_tensor_cores_bound_is_rescaled(
    family: str,
) -> None:
    """What is rescaled is told by its name: a family's new one must be among these, or of an SM."""
    of_an_sm = {"shared_clock", "exponential_clock", "l2_bandwidth", "exchange_bandwidth"}
    of_an_sm |= {"parts_bandwidth", "store_bandwidth", "direct_bandwidth"}
    of_an_sm |= {"reduction_bandwidth"}  # of L2: an H20 has as much as an H200
    found = shipped(H200)
    assert found
    constants = families.family(family).constants
    fitted = replace(found.families["gemm"], values=constants)
    changed = rescaled(replace(found, families={family: fitted}), "NVIDIA H20").families[family]
    rates = {one for one in constants if one.endswith(("_clock", "bandwidth"))}
    same = {one for one in constants if changed.values[one] == constants[one]}
    assert rates & same <= of_an_sm


def test_own_constants_come_before_lent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = shipped(H200)
    assert own
    gemm = replace(own, gpu=H100, families={"gemm": own.families["gemm"]})
    monkeypatch.setattr("warploom.generator.model.borrow.shipped", {H100: gemm, H200: own}.get)
    found = load(H100)
    assert found
    assert {name: one.fitted_on for name, one in found.families.items()} == {
        name: "" if name == "gemm" else H200 for name in own.families
    }
    # The H100 is nearer to an H800 than the H200 is.
    assert {name: one.fitted_on for name, one in load("NVIDIA H800").families.items()} == {  # type: ignore[union-attr]
        name: H100 if name == "gemm" else H200 for name in own.families
    }


# ---- What is chosen ------------------------------------------------------------------------------


@pytest.mark.parametrize("extents", [ROWS, SQUARE, (512, 6144, 4096)])
def test_a_close_kind_takes_the_schedule_of_the_very_shape_and_rescales_its_time(
    extents: tuple[int, int, int],
) -> None:
    there, here = choose(H200, extents), choose(H100, extents)
    assert there.reason.startswith("recorded") and here.spec == there.spec
    assert here.seconds and there.seconds
    slower = kind(H200).bytes_per_second / kind(H100).bytes_per_second
    assert there.seconds <= here.seconds <= slower * there.seconds * 1.001
    if extents == ROWS:
        assert here.seconds > 1.3 * there.seconds
    assert f"on {H200}" in here.reason and here.reason.endswith(dispatch.NOT_TIMED)
    assert {one.source for one in here.runners_up} == {"predicted"}
    assert here.asked and not here.asked.recorded, "autotuning would leave it as it is"


def test_explain_says_whose_records_and_model_were_taken() -> None:
    def explained(m: int, n: int, k: int) -> str:
        a, b = (torch.empty(*e, dtype=torch.bfloat16, device="meta") for e in ((m, k), (n, k)))
        return str(warploom.explain(a, b.t(), gpu="H100 SXM"))

    assert f"nearest record, 512x6144x4096 on {H200}" in explained(512, 6144, 4096)
    alone = explained(123, 777, 1000)
    assert f"cost model: no tuned config is near; its constants are those of {H200}" in alone
    assert alone.count(dispatch.NOT_TIMED) == 1


def test_a_kind_with_fewer_sms_or_another_balance_has_the_model_choose_among_contenders() -> None:
    """On an H20 128 rows are bound by its tensor cores; and 78 SMs have other waves."""
    there, here = choose(H200, SQUARE), choose("H20", SQUARE)
    assert there.seconds and here.seconds
    assert 800 / 148 * 0.8 < here.seconds / there.seconds < 800 / 148 * 1.25
    assert "scaled by the cost model" in here.reason and "taken" not in here.reason
    for extents in (ROWS, SQUARE, (200, 5000, 3000)):
        assert choose("H20", extents).reason.endswith(dispatch.NOT_TIMED)


def test_a_family_without_a_model_keeps_to_its_table_on_a_kind_with_other_sms(
    folder: Path,
) -> None:
    operation = MixedGemmOperation("bf16", "mxfp4", "bf16", 32, "e8m0")  # no shipped tuned config
    shape = MixedGemmShape(16, 4096, 4096)
    requires = families.family("mixed_gemm").table.required(operation, shape)

    def chosen(gpu: str, more: int = 0) -> dispatch.Choice:
        asked = operation, replace(shape, m=shape.m + more)
        return dispatch.choose(*asked, device=target(gpu), requires=requires)

    usual = chosen(H200).spec.schedule
    best = replace(usual, ctas_per_sm=3 - usual.ctas_per_sm)  # type: ignore[attr-defined]
    own = {"operation": operation, "shape": shape, "best": Timed(best, 1e-5, 0.0)}
    kept = record(**own, default=Timed(usual, 2e-5, 0.0), runners_up=())
    assert kept.environment.revision == families.family("mixed_gemm").revision
    keep(folder, H200, kept)
    close = chosen(H100)
    assert close.spec.schedule == best and "no cost model of this GPU" in close.reason
    assert close.reason.endswith(dispatch.NOT_TIMED)
    assert H200 not in chosen(H100, -1).reason  # where the table knows more
    for more in (0, -1):
        assert H200 not in chosen("H20", more).reason


# ---- Own records, and those that are lent --------------------------------------------------------


def test_own_records_come_first_and_lent_ones_fill_the_gaps(folder: Path) -> None:
    """Of a user who tuned three shapes of an H100."""
    listed = [record(m, best=Timed(PINGPONG, 5e-5, 0.003)) for m in (300, 512, 1000)]
    keep(folder, H100, *listed)
    assert choose(H100, (512, 6144, 4096)).reason.startswith("recorded 2026-11-21 at this shape")
    for m in (310, 560, 1100):  # an own one is nearer than a lent one of these very rows would be
        assert H200 not in choose(H100, (m, 6144, 4096)).reason
    for extents in (ROWS, (4096, 6144, 4096), (32, 6144, 4096)):  # farther than that
        assert f"on {H200}" in choose(H100, extents).reason
    fp16 = replace(PLAIN, a="fp16", b="fp16", d="fp16")
    assert H200 in choose(H100, (512, 6144, 4096), operation=fp16).reason


def test_a_users_records_of_a_kind_that_lends_are_lent_too(folder: Path) -> None:
    best = Timed(WIDE, 1e-6, 0.0)
    later = {"best": best, "runners_up": (), "default": None, "measured": "2027-01-01"}
    keep(folder, H200, record(*ROWS, **later))
    assert choose(H100, ROWS).spec.schedule == WIDE
    (folder / file_name(H200)).unlink()
    keep(folder, "NVIDIA H800", record(*ROWS, **later))
    assert choose(H100, ROWS).spec.schedule != WIDE, "a kind with a record or two lends nothing"


def test_a_kind_that_came_with_records_reads_no_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a kind's records takes a third of a second, in the first call of a process."""
    monkeypatch.setattr(records, "_lend", lambda gpu: pytest.fail("read another kind's"))
    assert choose(H200, ROWS).reason.startswith("recorded")
    assert choose(H200, (123, 777, 999)).reason.startswith("cost model")
    keep(folder, H100, record())
    assert choose(H100, (512, 6144, 4096)).reason.startswith("recorded")


def test_lent_records_are_never_taken_for_own_ones_or_written(folder: Path) -> None:
    (lender,) = records.lent(H100)
    assert len(records.known(H100).records) == 0 and len(lender.records) > 100
    before = records.digest(H100)
    problem = Problem(DeviceLimits(132, H100, "13.0"), PLAIN, GemmShape(*ROWS), began=0.0)
    keeping = Keeping()
    assert not keeping.recorded(problem)
    own = record(*ROWS, best=Timed(SLIM, 4e-5, 0.003))
    keeping.keep(H100, replace(own, environment=replace(own.environment, gpu=H100)))
    assert [one.shape for one in records_file.read(folder / file_name(H100))] == [GemmShape(*ROWS)]
    assert len(records.known(H100).records) == 1 and keeping.recorded(problem)
    assert records.digest(H100) != before
    assert records.digest("NVIDIA H800") != records.digest("")
    assert not (folder / file_name(H200)).exists()


def test_a_damaged_file_of_a_kind_that_lends_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / file_name(H200)).write_text("{")
    with caplog.at_level(logging.WARNING):
        found = choose(H100, ROWS)
    assert "not read: " in found.reason and file_name(H200) in found.reason
    assert f"on {H200}" in found.reason, "what came with the package is lent all the same"
    assert len(caplog.records) == 1


# ---- WARPLOOM_RECORDS=borrow ---------------------------------------------------------------------


def test_a_kinds_own_can_be_left_out_to_see_what_others_lend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = folder / "lender.json"
    listed = [record(*ROWS, best=Timed(PINGPONG, 8e-5, 0.0), runners_up=(), default=None)]
    here = replace(listed[0].environment, gpu=H100)
    records_file.update(lender, H100, [replace(listed[0], environment=here)])
    came = records_file.shipped
    monkeypatch.setattr(records_file, "shipped", lambda gpu: lender if gpu == H100 else came(gpu))
    keep(folder, H200, record(*ROWS, best=Timed(WIDE, 1e-6, 0.0)))
    assert choose(H200, ROWS).reason.startswith("recorded")
    monkeypatch.setenv("WARPLOOM_RECORDS", "borrow")
    records.forget()
    found = choose(H200, ROWS)
    assert found.spec.schedule == PINGPONG and f"on {H100}" in found.reason
    assert choose(H200, (123, 777, 999)).reason.startswith("default table: least waves"), (
        "no constants but its own"
    )
    with pytest.raises(ConfigurationError, match=r"WARPLOOM_RECORDS=borrow: must not be set"):
        autotune().__enter__()


# ---- MIG slices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "eighths"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 1),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 2),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 4),
        ("NVIDIA H100 80GB HBM3 MIG 1c.4g.40gb", 4),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 8),
        ("NVIDIA H100 NVL MIG 1g.12gb+me", 1),
        ("NVIDIA H100 NVL MIG 3g.47gb", 4),
        ("NVIDIA H200 MIG 1g.18gb", 1),
        ("NVIDIA H200 MIG 2g.35gb", 2),
        ("NVIDIA H200 MIG 4g.71gb", 4),
        ("NVIDIA H20 MIG 1g.12gb", 1),
    ],
)
def test_a_mig_slice_has_as_much_of_memory_and_l2_as_its_name_says(name: str, eighths: int) -> None:
    whole, part = kind(name.partition(" MIG ")[0]), kind(name)
    assert part.share == eighths / 8
    assert part.bytes_per_second == whole.bytes_per_second * eighths / 8
    lent, own = load(name), load(whole.name)
    assert lent and own
    mine, theirs = (one.families["gemm"].values for one in (lent, own))
    assert mine["tensor_clock"] == pytest.approx(theirs["tensor_clock"])
    for constant in ("hbm_bandwidth", "l2_total", "l2_bytes"):
        assert mine[constant] == pytest.approx(theirs[constant] * eighths / 8)


def test_a_mig_slice_borrows_of_its_own_gpu_and_takes_its_sms_of_the_device() -> None:
    sliced = DeviceLimits(60, "NVIDIA H200 MIG 3g.71gb")
    found = choose("H200 MIG 3g.71gb:60", ROWS)
    assert found == replace(choose("H200 MIG 3g.71gb:60", ROWS, device=sliced), asked=found.asked)
    assert f"on {H200}" in found.reason and found.seconds
    whole = choose(H200, ROWS).seconds
    assert whole and 1.7 * whole < found.seconds < 2.3 * whole
    smaller = choose("H200 MIG 3g.71gb:32", SQUARE).seconds
    larger = choose("H200 MIG 3g.71gb:60", SQUARE).seconds
    assert smaller and larger and 1.5 < smaller / larger < 2.2


@functools.cache
def _fitted() -> float:
    found = shipped(H200)
    spec = KernelSpec("sm_90a", PLAIN, PINGPONG)
    return predict(found, spec, GemmShape(*SQUARE), 132) or 0.0


def test_variants_that_have_no_row_are_like_the_first_of_their_product() -> None:
    assert kind("NVIDIA GH200 96GB") is KINDS["NVIDIA GH200 480GB"]
    assert kind("NVIDIA H100 CNX").name == H100 and kind("NVIDIA A100").name == DEFAULT.name
    lent = load("NVIDIA H100 CNX")
    assert lent and lent.families["gemm"].fitted_on == H200
    spec = KernelSpec("sm_90a", PLAIN, PINGPONG)
    seconds = predict(lent, spec, GemmShape(*SQUARE), 114)
    assert seconds and 1.0 < seconds / _fitted() < 1.3


# ---- Tuning, and the command ---------------------------------------------------------------------


def test_a_search_tries_lent_schedules_first_and_its_default_is_the_untuned_one() -> None:
    operation, shape = PLAIN, GemmShape(*ROWS)
    every = records.known(H200).records
    there = next(one for one in every if (one.operation, one.shape) == (operation, shape))
    here = replace(there.environment, gpu=H100)
    space = tuple(
        spec
        for one in there.contenders
        if (spec := dispatch.fitting(operation, shape, one.schedule, "sm_90a", "tma"))
    )
    problem = Tuned(operation, shape, space)
    search = searched(problem, here, Records(H100), load(H100), (), exhaustive=False)
    assert search.ahead[1].schedule == there.best.schedule
    device = DeviceLimits(132, H100)
    assert search.default == dispatch.untuned(operation, shape, device, "tma").spec


@pytest.mark.parametrize(
    ("written", "kinds"),
    [
        ("h20", ["H20"]),  # and no H200, which has that in its name
        ("gh200 144gb", ["GH200 144G HBM3e"]),
        ("h100 sxm mig 3g.40gb", ["H100 80GB HBM3 MIG 3g.40gb"]),
        ("h800", ["H800"]),
        ("gh200", ["GH200 480GB", "GH200 120GB", "GH200 144G HBM3e"]),
        ("H200", []),
    ],
)
def test_the_command_names_the_kind_that_lends(written: str, kinds: list[str]) -> None:
    """By every name that `--gpu` of other commands takes: `gh200 144gb` had nothing to tell."""
    shown = CliRunner().invoke(main, ["records", "show", "--gpu", written, "--family", "gemm"])
    assert shown.exit_code == 0, shown.output
    told = [line for line in shown.output.splitlines() if "borrow" in line]
    assert told == [
        f"NVIDIA {one} has no records: calls borrow those of {H200}, rescaled" for one in kinds
    ]
    assert ("no records of these" in shown.output) is bool(kinds)

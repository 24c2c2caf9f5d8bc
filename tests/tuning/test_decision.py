"""Dispatch asks a given spec, an exact record, the nearest one, the model, the default in turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import GPU, environment

import warploom
from warploom.errors import ConfigurationError
from warploom.generator import records_file
from warploom.generator.families import family
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_backward.model import START as BACKWARD
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.families.gemm.model import START
from warploom.generator.gpus import file_name
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.model.constants import Constants, FamilyConstants, Quality
from warploom.generator.records import Record, Timed
from warploom.generator.specification import KernelSpec
from warploom.runtime import decision, dispatch, plan, records, targets
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.operation import shape as shape_of
from warploom.runtime.families._attention.problem import Extents

H200 = DeviceLimits(132, GPU, records.nvrtc() or "13.0")
PLAIN = GemmOperation("bf16", "bf16", "bf16")
PINGPONG = GemmSchedule((128, 128, 64), 6, (2, 1), roles="pingpong")
WIDE = GemmSchedule((128, 256, 64), 4, (2, 1))
SLIM = GemmSchedule((64, 96, 64), 10, consumers=1)


def record(m: int = 512, n: int = 6144, k: int = 4096, **more: Any) -> Record:
    here = replace(environment(), nvrtc=H200.nvrtc)
    fields = {
        "operation": PLAIN,
        "shape": GemmShape(m, n, k),
        "environment": here,
        "best": Timed(SLIM, 4e-5, 0.003),
        "default": Timed(PINGPONG, 5e-5, 0.003),
        "runners_up": (Timed(WIDE, 4.4e-5, 0.003),),
        "measured": "2026-11-21T00:00:00+00:00",
    }
    return Record(**{**fields, **more})


def choose(m: int = 512, n: int = 6144, k: int = 4096, **more: Any) -> decision.Choice:
    fields = {"operation": PLAIN, "device": H200, "requires": "tma", **more}
    return dispatch.choose(shape=GemmShape(m, n, k), **fields)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of records of this test's own, without what came with the package."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path))
    monkeypatch.setattr(records_file, "shipped", lambda gpu: None)
    records.forget()
    yield tmp_path / file_name(GPU)
    records.forget()


def keep(path: Path, *listed: Record) -> None:
    records_file.update(path, GPU, listed)
    records.forget()


def with_quality(
    monkeypatch: pytest.MonkeyPatch, quality: Quality | None, stand_in: str = ""
) -> None:
    family = FamilyConstants(START, 100, 28, 0.02, (), quality)
    constants = Constants(GPU, 132, {"gemm": family}, stand_in)
    monkeypatch.setattr(records, "load", lambda gpu: constants)
    records.forget()


GOOD = Quality(28, 1.01, 0.96)


# ---- The order -----------------------------------------------------------------------------------


def test_a_given_spec_comes_before_every_record(fresh: Path) -> None:
    keep(fresh, record())
    given = KernelSpec("sm_90a", PLAIN, WIDE)
    assert choose(spec=given).spec == given


def test_an_exact_record_decides_and_tells_its_runners_up(fresh: Path) -> None:
    keep(fresh, record(), record(m=256, best=Timed(WIDE, 1e-5, 0.0)))
    found = choose()
    assert found.spec.schedule == SLIM and found.seconds == 4e-5
    assert "recorded 2026-11-21 at this shape, 1.250 times as fast as the default" in found.reason
    assert [(one.spec.schedule, one.source) for one in found.runners_up] == [
        *((WIDE, "recorded"), (PINGPONG, "recorded"))
    ]


def test_a_record_whose_best_is_the_default_gives_the_best(fresh: Path) -> None:
    """Gradients lost 3 to 5 % to this: the runner-up was taken wherever tuning kept the default."""
    keep(fresh, record(best=Timed(PINGPONG, 4e-5, 0.003), default=Timed(PINGPONG, 4e-5, 0.003)))
    found = choose()
    assert found.spec.schedule == PINGPONG and found.seconds == 4e-5
    assert [one.spec.schedule for one in found.runners_up] == [WIDE]


def test_the_nearest_record_is_carried_over_by_the_model(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_quality(monkeypatch, None)
    keep(fresh, record())
    found = choose(m=600)
    assert "nearest record, 512x6144x4096, carried over by the model" in found.reason
    assert found.seconds and 4e-5 < found.seconds < 8e-5
    assert {one.source for one in found.runners_up} == {"predicted"}
    # Slim tiles are fewest at 512 rows; the model knows that they are many at 2048.
    assert choose(m=2048).spec.schedule != SLIM
    assert "nearest record" in choose(m=2048).reason


def test_what_lies_too_far_is_no_record(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_quality(monkeypatch, None)
    keep(fresh, record())
    assert choose(m=8192).reason.startswith("least waves * cost")
    assert choose(k=512).reason.startswith("least waves * cost")
    fp16 = replace(PLAIN, a="fp16", b="fp16", d="fp16")
    assert choose(operation=fp16).reason.startswith("least waves * cost")
    with_quality(monkeypatch, GOOD)  # a model that decides alone is asked from farther on
    assert "nearest record" in choose(m=600).reason
    assert choose(m=1024).reason.startswith("the model alone")


def test_the_model_alone_decides_where_it_was_found_good(monkeypatch: pytest.MonkeyPatch) -> None:
    with_quality(monkeypatch, GOOD)
    found = choose()
    assert found.reason.startswith("the model alone") and found.seconds
    assert len(found.runners_up) == decision.SHOWN
    for quality, stand_in in ((None, ""), (replace(GOOD, first=1.2), ""), (GOOD, "another GPU")):
        with_quality(monkeypatch, quality, stand_in)
        assert choose().reason.startswith("least waves * cost")


def test_the_default_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "load", lambda gpu: None)
    records.forget()
    table = dispatch.untuned(PLAIN, GemmShape(512, 6144, 4096), H200)
    assert choose() == table
    assert choose(device=DeviceLimits(132)) == table


# ---- Records that do not fit as they are ---------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("nvrtc", "12.8", "nvrtc 12.8, here"),
        ("revision", 7, "revision 7, here 1"),
        ("multiprocessors", 114, "multiprocessors 114, here 132"),
    ],
)
def test_a_stale_record_is_a_hint_and_said_to_be_stale(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, told: str
) -> None:
    with_quality(monkeypatch, None)
    stale = record()
    keep(fresh, replace(stale, environment=replace(stale.environment, **{field: value})))
    found = choose()
    assert "stale: " in found.reason and told in found.reason
    keep(fresh, record(m=500))  # farther away, but not stale
    assert "500x6144x4096" in choose().reason and "stale" not in choose().reason


def test_a_d_that_tma_cannot_store_gets_the_recorded_schedule_with_direct_stores(
    fresh: Path,
) -> None:
    keep(fresh, record())
    found = choose(requires="direct")
    assert found.spec.schedule == replace(SLIM, store="direct")


def test_what_is_recorded_but_not_legal_here_is_passed_over(fresh: Path) -> None:
    # 128x208 with one consumer has no registers left for direct stores.
    tight = GemmSchedule((128, 208, 64), 4, consumers=1)
    keep(fresh, record(best=Timed(tight, 1e-5, 0.0)))
    assert choose().spec.schedule == tight
    assert choose(requires="direct").spec.schedule == replace(WIDE, store="direct")


def test_without_a_model_the_nearest_record_is_taken_as_it_is(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "load", lambda gpu: None)
    keep(fresh, record())
    found = choose(m=600)
    assert found.spec.schedule == SLIM and "no model of this GPU" in found.reason


def test_the_default_stays_where_another_is_faster_by_less_than_predictions_are_sure_of(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each call near a record would compile a kernel of its own for nothing."""
    monkeypatch.setattr(records, "load", lambda gpu: None)
    records.forget()
    default = choose(m=600).spec.schedule
    for slower, kept in ((1 + decision.TIE / 2, default), (1 + 2 * decision.TIE, SLIM)):
        tried = Timed(default, slower * 4e-5, 0.003)
        keep(fresh, record(best=Timed(SLIM, 4e-5, 0.003), default=tried, runners_up=()))
        assert choose(m=600).spec.schedule == kept


def test_a_damaged_file_is_left_out_with_a_warning_and_explained(
    fresh: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.write_text('{"schema": 1, "gpu"')
    with_quality(monkeypatch, None)
    with caplog.at_level(logging.WARNING):
        found = choose()
        choose(m=64)
    assert "damaged or cut short" in found.reason and "least waves * cost" in found.reason
    assert len([one for one in caplog.records if "damaged" in one.message]) == 1
    assert fresh.read_text() == '{"schema": 1, "gpu"'


def test_records_can_be_ignored(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(fresh, record())
    monkeypatch.setenv("WARPLOOM_RECORDS", "ignore")
    records.forget()
    assert choose().reason.startswith("least waves * cost")
    monkeypatch.setenv("WARPLOOM_RECORDS", "sometimes")
    records.forget()
    with pytest.raises(ConfigurationError, match="WARPLOOM_RECORDS=sometimes"):
        choose()


def test_a_users_record_comes_before_a_shipped_one_of_an_earlier_day(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped.json"
    old = record(best=Timed(WIDE, 1e-5, 0.0), measured="2026-01-01T00:00:00+00:00")
    records_file.update(shipped, GPU, [old])
    monkeypatch.setattr(records_file, "shipped", lambda gpu: shipped)
    records.forget()
    assert choose().spec.schedule == WIDE
    keep(fresh, record())
    assert choose().spec.schedule == SLIM


# ---- Attention -----------------------------------------------------------------------------------


def test_attention_asks_the_records_too(fresh: Path) -> None:
    operation = AttentionOperation("bf16", 128, "causal")
    schedule = AttentionSchedule(64, 96, pingpong=False)
    own = environment("attention_forward")
    here = replace(record().environment, revision=own.revision)
    shape = AttentionShape(2, 16, 16, 4096, 4096, 128)
    keep(fresh, Record(operation, shape, here, Timed(schedule, 1e-3, 0.0), None))
    sizes = Extents(2, 16, 16, 4096, 4096, 128, 4096, 4096, packed=False)
    band = Band(right=0)
    found = dispatch.choose(operation, shape_of(sizes, band), device=H200)
    assert found.spec.schedule == schedule and "recorded" in found.reason
    beside = replace(sizes, seq_q=4608, seq_k=4608)  # near, also where the model decides
    near = dispatch.choose(operation, shape_of(beside, band), device=H200)
    assert "nearest record" in near.reason
    nowhere = dispatch.choose(operation, shape_of(sizes, band))
    assert nowhere.reason.startswith("first of its class")


def gradients_record(**fields: Any) -> Record:
    operation = AttentionBackwardOperation("bf16", 128, "causal")
    here = replace(environment("attention_backward"), nvrtc=H200.nvrtc)
    given = {
        "operation": operation,
        "shape": AttentionShape(2, 16, 16, 4096, 4096, 128),
        "environment": here,
        "best": Timed(AttentionBackwardSchedule(48, 128, 2, overlap=True), 1e-3, 0.001),
        "default": Timed(AttentionBackwardSchedule(64, 128, 2, overlap=False), 1.2e-3, 0.001),
        "measured": "2026-11-22T00:00:00+00:00",
        **fields,
    }
    return Record(**given)


def test_gradients_ask_the_records_too(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = gradients_record()
    operation: Any = one.operation
    keep(fresh, one)
    sizes = Extents(2, 16, 16, 4096, 4096, 128, 4096, 4096, packed=False)
    band = Band(right=0)

    def choose(sizes: Extents, device: DeviceLimits = H200) -> decision.Choice:
        return dispatch.choose(operation, shape_of(sizes, band), device=device)

    assert choose(sizes).spec.schedule == one.best.schedule
    assert "recorded" in choose(sizes).reason and "1.200 times" in choose(sizes).reason
    beside = replace(sizes, seq_q=4608, seq_k=4608)  # near, also where the model decides
    assert "nearest record" in choose(beside).reason
    longer = replace(sizes, seq_q=8192, seq_k=8192)
    family = FamilyConstants(BACKWARD, 36, 12, 0.03)
    constants = Constants(GPU, 132, {"attention_backward": family})
    monkeypatch.setattr(records, "load", lambda gpu: constants)
    records.forget()
    carried = choose(longer)
    assert "carried over by the model" in carried.reason
    assert 3.2e-3 < (carried.seconds or 0) < 4e-3  # twice the length
    assert choose(replace(sizes, seq_q=64, seq_k=64)).reason.startswith("first of its class")
    assert choose(sizes, NO_GPU).reason.startswith("first of its class")
    ordered = replace(operation, deterministic=True)
    found = dispatch.choose(ordered, shape_of(sizes, band), device=H200)
    assert found.reason.startswith("first of its class")  # another operation
    given = KernelSpec("sm_90a", operation, AttentionBackwardSchedule(64, 64, overlap=False))
    told = dispatch.choose(operation, shape_of(sizes, band), spec=given, device=H200)
    assert (told.spec, told.reason) == (given, "the spec that was given")


def test_the_model_chooses_gradients_among_the_table_where_it_is_good(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = Constants(
        GPU, 132, {"attention_backward": FamilyConstants(BACKWARD, 900, 35, 0.03, (), GOOD)}
    )
    monkeypatch.setattr(records, "load", lambda gpu: constants)
    records.forget()
    operation = AttentionBackwardOperation("bf16", 128)
    sizes = Extents(32, 16, 16, 512, 512, 128, 512, 512, packed=False)
    found = dispatch.choose(operation, shape_of(sizes, Band()), device=H200)
    assert found.reason.startswith("the model alone") and found.runners_up
    rows = family("attention_backward").table.classes
    listed = [fields for row in rows if row["dim"] == 128 for fields in row["schedules"]]
    assert found.spec.schedule in [AttentionBackwardSchedule(**fields) for fields in listed]


def test_windows_and_packed_lengths_are_shapes_of_their_own() -> None:
    sizes = Extents(2, 16, 16, 4096, 4096, 128, 4096, 4096, packed=False)
    assert shape_of(sizes, Band()).window == 0
    assert shape_of(sizes, Band(right=0)).window == 0
    assert shape_of(sizes, Band(left=1023, right=0)).window == 1024
    packed = shape_of(replace(sizes, total_q=6000, total_k=6000, packed=True), Band())
    assert (packed.total_q, packed.total_k) == (6000, 6000)


# ---- What a call costs and says ------------------------------------------------------------------


def test_a_warm_call_asks_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(16, 64).bfloat16(), torch.ones(64, 32).bfloat16()
    asked: list[int] = []
    plain = dispatch.choose

    def counted(*arguments: Any, **keywords: Any) -> decision.Choice:
        asked.append(1)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(dispatch, "choose", counted)
    plan.forget()
    for _ in range(5):
        warploom.gemm(a, b)
    assert len(asked) == 1


def test_explain_tells_the_times_of_the_choice_and_of_those_after_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(fresh, record(64, 384, 512))
    a, b = torch.ones(64, 512).bfloat16(), torch.ones(384, 512).bfloat16().t()
    plan.forget()
    monkeypatch.setattr(targets, "at_hand", lambda device: H200)
    told = warploom.explain(a, b)
    assert (told.seconds, len(told.runners_up)) == (4e-5, 2)
    text = str(told)
    assert "time     40.0 us" in text and text.count("\nnext     gemm_sm90a") == 2
    assert "recorded 44.0 us" in text
    plan.forget()


def test_explain_tells_of_the_gradients_too(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = gradients_record(shape=AttentionShape(1, 2, 2, 64, 64, 128))
    keep(fresh, one)
    monkeypatch.setattr(targets, "at_hand", lambda device: H200)
    q, k, v = (torch.ones(1, 2, 64, 128).bfloat16() for _ in "qkv")
    told = warploom.explain(warploom.plan_attention(q, k, v, causal=True))
    assert told.gradients and told.gradients.spec.schedule == one.best.schedule
    assert told.gradients.seconds == 1e-3 and len(told.gradients.runners_up) == 1
    lines = str(told).splitlines()
    first = lines.index(f"backward {told.backward}")
    assert lines[first + 1].startswith("because  recorded 2")
    assert lines[first + 2] == "time     1000.0 us"
    assert lines[first + 3].startswith("next     attention_backward_sm90a")

"""Dispatch asks a given spec, an exact record, the nearest one, the model, the default in turn."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from decisions import GOOD, H200, PINGPONG, PLAIN, SLIM, WIDE, choose, keep, record, with_quality
from sweeps import GPU, environment

import warploom
from warploom.errors import ConfigurationError
from warploom.generator import records_file
from warploom.generator.epilogue import Bias, Gate, Preactivation
from warploom.generator.families import family
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_decode import DecodeOperation
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.families.gemm.table import GemmTable
from warploom.generator.families.mixed_gemm import MixedGemmOperation
from warploom.generator.launches import DeviceLimits
from warploom.generator.model.constants import DOUBT
from warploom.generator.records import Timed
from warploom.generator.specification import KernelSpec, Operation
from warploom.runtime import dispatch, plan, records, targets

pytestmark = pytest.mark.usefixtures("fresh")

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


def test_a_gate_is_run_as_its_gemm_was_timed_where_nothing_better_is_known(fresh: Path) -> None:
    keep(fresh, record())
    gated = replace(PLAIN, epilogue=(Preactivation("bf16"), Gate("silu")))
    found = choose(operation=gated)
    assert found.spec.operation == gated and found.spec.schedule == SLIM
    assert found.reason.endswith(", of bf16_bf16_bf16_row_col_fast")
    assert found.asked and not found.asked.recorded  # online autotuning may still time it
    assert "nearest record, 512x6144x4096" in choose(m=600, operation=gated).reason
    keep(fresh, record(operation=gated, best=Timed(WIDE, 1e-5, 0.0)))
    assert choose(operation=gated).spec.schedule == WIDE
    biased = choose(operation=replace(PLAIN, epilogue=(Bias("bf16"),)))
    assert biased.reason.startswith("cost model")


@pytest.mark.parametrize("scores", ["e4m3", "int8"])
def test_calls_of_attention_in_8_bits_run_what_is_recorded(
    fresh: Path, scores: Literal["e4m3", "int8"]
) -> None:
    scales: Literal["heads", "blocks"] = "blocks" if scores == "int8" else "heads"
    timed = AttentionOperation("bf16", 128, scores=scores, weights="e4m3", scales=scales)
    tile = AttentionSchedule(128, 64, overlap=False, pingpong=False, scheduler="dynamic")
    here = replace(environment("attention_forward"), nvrtc=H200.nvrtc)
    shape = AttentionShape(4, 16, 16, 4096, 4096, 128)
    told: dict[str, Any] = {"operation": timed, "shape": shape, "environment": here}
    keep(fresh, record(**told, best=Timed(tile, 1e-3, 0.0), default=None, runners_up=()))
    found = dispatch.choose(timed, shape, device=H200)
    assert "recorded 2026" in found.reason and found.spec.schedule == tile
    near = dispatch.choose(timed, replace(shape, seq_q=3968, seq_k=3968), device=H200)
    assert "nearest record" in near.reason and near.spec.operation == timed


def test_block_scales_of_either_type_are_timed_once(fresh: Path) -> None:
    timed = GemmOperation("e4m3", "e4m3", "bf16", accumulation="promoted", block_scales="row_block")
    tile, usual = GemmSchedule((64, 64, 128), 10, consumers=1), GemmSchedule((128, 64, 128), 7)
    told = {"best": Timed(tile, 4e-5, 0.0), "default": Timed(usual, 5e-5, 0.0), "runners_up": ()}
    keep(fresh, record(operation=timed, **told))
    e8m0: Any = {"block_scale_a": "e8m0", "block_scale_b": "e8m0"}
    for other in (
        replace(timed, **e8m0),
        replace(timed, b="e5m2", d="fp32", epilogue=(Bias("fp32"),)),
        replace(timed, epilogue=(Gate("silu"),)),
    ):
        found = choose(operation=other)
        assert found.spec.operation == other and found.spec.schedule == tile
    both = choose(operation=replace(timed, block_scales="row_row"))
    assert both.reason.startswith("cost model")  # a scale of each column takes longer


def test_the_nearest_record_is_carried_over_by_the_model(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_quality(monkeypatch, None)
    keep(fresh, record())
    found = choose(m=600)
    assert "nearest record, 512x6144x4096, scaled by the cost model" in found.reason
    assert found.seconds and 4e-5 < found.seconds < 8e-5
    assert {one.source for one in found.runners_up} == {"predicted"}
    # Slim tiles are fewest at 512 rows; the model knows that they are many at 2048.
    assert choose(m=2048).spec.schedule != SLIM
    assert "nearest record" in choose(m=2048).reason


def test_what_lies_too_far_is_no_record(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_quality(monkeypatch, None)
    keep(fresh, record())
    assert choose(m=8192).reason.startswith("default table: least waves * cost")
    assert choose(k=512).reason.startswith("default table: least waves * cost")
    fp16 = replace(PLAIN, a="fp16", b="fp16", d="fp16")
    assert choose(operation=fp16).reason.startswith("default table: least waves * cost")
    with_quality(monkeypatch, GOOD)  # a model that decides alone is asked from farther on
    assert "nearest record" in choose(m=600).reason
    assert "nearest record" in choose(m=1024).reason  # of this layer
    assert choose(n=9216).reason.startswith("cost model")


def test_the_model_alone_decides_where_it_was_found_good(monkeypatch: pytest.MonkeyPatch) -> None:
    with_quality(monkeypatch, GOOD)
    found = choose()
    assert found.reason.startswith("cost model") and found.seconds
    assert len(found.runners_up) == dispatch.SHOWN
    with_quality(monkeypatch, GOOD, "another GPU")
    lent = choose()
    assert lent.spec == found.spec
    assert "those of another GPU, rescaled; nothing was timed on this GPU kind" in lent.reason
    for quality in (None, replace(GOOD, first=1.2)):
        with_quality(monkeypatch, quality)
        assert choose().reason.startswith("default table: least waves * cost")


def test_the_default_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "load", lambda gpu, own: None)
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
    monkeypatch.setattr(records, "load", lambda gpu, own: None)
    keep(fresh, record())
    found = choose(m=600)
    assert found.spec.schedule == SLIM and "no cost model of this GPU" in found.reason


def test_where_the_table_knows_more_a_record_tells_of_its_own_shape_alone(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ternary weights at 9 rows got the tile of 8 rows of a record, and were read twice."""
    monkeypatch.setattr(GemmTable, "uses_near_records", lambda table, operation: False)
    keep(fresh, record())
    assert choose().spec.schedule == SLIM
    assert "record" not in choose(m=600).reason and choose(m=600).spec.schedule != SLIM
    keep(fresh, record(), record(m=700))
    assert choose(m=600).spec.schedule == SLIM, "what two records agree on is right between them"


@pytest.mark.parametrize(
    ("operation", "uses_near"),
    [
        (PLAIN, True),
        (replace(PLAIN, batched=True, groups="rows"), False),
        (MixedGemmOperation("int8", "ternary", "bf16", 0, "bf16"), False),
        (MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16"), False),
        (DecodeOperation("bf16", 128), False),
    ],
    ids=str,
)
def test_the_table_decides_where_records_of_other_shapes_chose_worse(
    operation: Operation, uses_near: bool
) -> None:
    assert family(operation.family).table.uses_near_records(operation) == uses_near


def test_what_is_only_predicted_must_be_faster_by_more_than_predictions_of_a_layer_are_sure_of(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuned weight lost 2 to 17 % at other m to kernels that the model was too kind to."""
    keep(fresh, record(best=Timed(SLIM, 4e-5, 0.003), default=None, runners_up=()))

    def chosen(error: float, n: int) -> dispatch.Choice:
        with_quality(monkeypatch, GOOD, error=error)
        return choose(m=600, n=n)

    sure = chosen(1e-6, 6144)
    told = re.search(r"predicted to be (\S+) times as fast as the best of it", sure.reason)
    assert told and sure.spec.schedule != SLIM
    gain = math.log(float(told[1]))
    kept = chosen(1.1 * gain / DOUBT, 6144)
    assert kept.spec.schedule == SLIM and "times as fast" not in kept.reason
    assert sure.spec in [one.spec for one in kept.runners_up]
    assert chosen(0.9 * gain / DOUBT, 6144).spec == sure.spec
    assert chosen(1.0, 6136).spec.schedule != SLIM  # another layer's record says less


def test_a_schedule_that_is_best_on_both_sides_of_a_number_of_rows_is_taken(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 rows of a weight ran another kernel than 1 and 16, which took 6 % longer."""
    with_quality(monkeypatch, GOOD, error=1e-6)  # a model that is sure of itself

    def kept(*listed: tuple[int, GemmSchedule]) -> None:
        fresh.unlink(missing_ok=True)
        others = (Timed(PINGPONG, 2.1e-5, 0.0),)
        for m, best in listed:
            keep(fresh, record(m, best=Timed(best, 2e-5, 0.0), default=None, runners_up=others))

    kept((16, WIDE))
    assert choose(m=20).spec.schedule != WIDE  # 128 rows for 20: the model would never
    kept((16, WIDE), (1024, WIDE))
    for m in (17, 100, 128, 1000):  # near one of both, or of neither
        found = choose(m=m)
        assert found.spec.schedule == WIDE and found.seconds, m
        assert "as do those of 16x6144x4096 and 1024x6144x4096, between" in found.reason
    assert "nearest record, 16x6144x4096" in choose(m=17).reason
    assert "nearest record, 1024x6144x4096" in choose(m=1000).reason
    for m, n in ((8, 6144), (2048, 6144), (100, 6152)):  # beyond them, and of another weight
        assert "between" not in choose(m=m, n=n).reason
    assert "between" not in choose(m=100, operation=replace(PLAIN, d="fp32")).reason
    kept((16, WIDE), (64, SLIM), (1024, WIDE))
    assert "between" not in choose(m=100).reason and "between" not in choose(m=20).reason
    assert choose(m=64).reason.startswith("recorded")


def test_no_schedule_is_taken_between_stale_records_or_where_tensors_cannot_have_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_quality(monkeypatch, GOOD, error=1e-6)
    tight = GemmSchedule((128, 208, 64), 4, consumers=1)  # no registers are left for direct stores
    best = {"best": Timed(tight, 2e-5, 0.0), "default": None}
    keep(fresh, record(16, **best), record(1024, **best))
    assert choose(m=100).spec.schedule == tight
    assert choose(m=100, requires="direct").spec.schedule != replace(tight, store="direct")
    fresh.unlink()
    stale = record(16, **best)
    keep(
        fresh,
        record(1024, **best),
        replace(stale, environment=replace(stale.environment, nvrtc="12.8")),
    )
    assert "between" not in choose(m=100).reason


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
    assert choose().reason.startswith("default table: least waves * cost")
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


# ---- What a call costs and says ------------------------------------------------------------------


def test_a_warm_call_asks_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(16, 64).bfloat16(), torch.ones(64, 32).bfloat16()
    asked: list[int] = []
    plain = dispatch.choose

    def counted(*arguments: Any, **keywords: Any) -> dispatch.Choice:
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

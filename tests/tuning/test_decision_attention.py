"""Dispatch asks for attention and its gradients what it asks for products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decisions import GOOD, H200, keep
from sweeps import GPU, environment

import warploom
from warploom.generator.families import family
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_backward.model import START as BACKWARD
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.model.constants import Constants, FamilyConstants
from warploom.generator.records import Record, Timed
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch, records, targets
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.mask import shape as shape_of
from warploom.runtime.families._attention.problem import Extents

pytestmark = pytest.mark.usefixtures("fresh")


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

    def choose(sizes: Extents, device: DeviceLimits = H200) -> dispatch.Choice:
        return dispatch.choose(operation, shape_of(sizes, band), device=device)

    assert choose(sizes).spec.schedule == one.best.schedule
    assert "recorded" in choose(sizes).reason and "1.200 times" in choose(sizes).reason
    beside = replace(sizes, seq_q=4608, seq_k=4608)  # near, also where the model decides
    assert "nearest record" in choose(beside).reason
    longer = replace(sizes, seq_q=8192, seq_k=8192)
    family = FamilyConstants(BACKWARD, 36, 12, 0.03)
    constants = Constants(GPU, 132, {"attention_backward": family})
    monkeypatch.setattr(records, "load", lambda gpu, own: constants)
    records.forget()
    carried = choose(longer)
    assert "scaled by the cost model" in carried.reason
    assert 3.2e-3 < (carried.seconds or 0) < 4e-3  # twice the length
    assert choose(replace(sizes, seq_q=64, seq_k=64)).reason.startswith(
        "default table: first of its class"
    )
    assert choose(sizes, NO_GPU).reason.startswith("default table: first of its class")
    ordered = replace(operation, deterministic=True)
    found = dispatch.choose(ordered, shape_of(sizes, band), device=H200)
    assert found.reason.startswith("default table: first of its class")  # another operation
    given = KernelSpec("sm_90a", operation, AttentionBackwardSchedule(64, 64, overlap=False))
    told = dispatch.choose(operation, shape_of(sizes, band), spec=given, device=H200)
    assert (told.spec, told.reason) == (given, "the spec that was given")


def test_the_model_chooses_gradients_among_the_table_where_it_is_good(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = Constants(
        GPU, 132, {"attention_backward": FamilyConstants(BACKWARD, 900, 35, 0.03, (), GOOD)}
    )
    monkeypatch.setattr(records, "load", lambda gpu, own: constants)
    records.forget()
    operation = AttentionBackwardOperation("bf16", 128)
    sizes = Extents(32, 16, 16, 512, 512, 128, 512, 512, packed=False)
    found = dispatch.choose(operation, shape_of(sizes, Band()), device=H200)
    assert found.reason.startswith("cost model") and found.runners_up
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

"""A record and a model that are made up, and what dispatch makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweeps import GPU, environment

from warploom.generator import records_file
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.families.gemm.model import START
from warploom.generator.launches import DeviceLimits
from warploom.generator.model.constants import Constants, FamilyConstants, Quality
from warploom.generator.records import Record, Timed
from warploom.runtime import dispatch, records

H200 = DeviceLimits(132, GPU, records.nvrtc() or "13.0")
PLAIN = GemmOperation("bf16", "bf16", "bf16")
PINGPONG = GemmSchedule((128, 128, 64), 6, (2, 1), kernel_schedule="pingpong")
WIDE = GemmSchedule((128, 256, 64), 4, (2, 1))
SLIM = GemmSchedule((64, 96, 64), 10, consumers=1)
GOOD = Quality(28, 1.01, 0.96)


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


def choose(m: int = 512, n: int = 6144, k: int = 4096, **more: Any) -> dispatch.Choice:
    fields = {"operation": PLAIN, "device": H200, "requires": "tma", **more}
    return dispatch.choose(shape=GemmShape(m, n, k), **fields)


def keep(path: Path, *listed: Record) -> None:
    records_file.update(path, GPU, listed)
    records.forget()


def with_quality(
    monkeypatch: pytest.MonkeyPatch,
    quality: Quality | None,
    fitted_on: str = "",
    error: float = 0.02,
) -> None:
    family = FamilyConstants(START, 100, 28, error, (), quality, fitted_on)
    constants = Constants(GPU, 132, {"gemm": family})
    monkeypatch.setattr(records, "load", lambda gpu, own: constants)
    records.forget()

"""The cells of the family: which there are, what they are called, and a run of one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import runner
from benchmarks.families import Asked, Case


def listed(**asked: Any) -> list[Case]:
    return list(runner.cases(runner.named(["mixed_gemm"]), Asked(**asked)))


def test_the_floor_is_what_must_be_read() -> None:
    (case,) = listed(match="w4a16 1x28672x4096")
    assert case.floor is not None and case.floor.limit == "bytes"
    assert case.floor.seconds * 1e6 == pytest.approx(60.6e6 / 4.35e12 * 1e6, rel=0.01)
    (case,) = listed(match="w4a8 4096x28672x4096")
    assert case.floor is not None and case.floor.limit == "flops"
    assert case.floor.seconds * 1e6 == pytest.approx(601, rel=0.01)
    (case,) = listed(cells=("decode",), types=("w4a16",), m=(1,))
    weights = 4 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336) * 4.125 / 8
    read = weights + 2 * 32000 * 4096 + 4 * 4 * 8 * 1024 * 128
    assert case.floor is not None
    assert case.floor.seconds == pytest.approx(read / 4.35e12, rel=0.01)

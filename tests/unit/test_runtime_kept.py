"""Buffers that stay zeros: none is given twice, and a plan knows which of them a launch may use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.generator.launches import Workspace
from warploom.runtime import driver, kept
from warploom.runtime.plan import LaunchPlan

SLOTS, SLOT_BYTES = kept._SLOTS, kept._SLOT_BYTES
COUNTER = Workspace("counter", 4, kept=True)


@pytest.fixture
def slab(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A slab of the first device, in the memory of this process."""
    room = torch.zeros(SLOTS * SLOT_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(kept, "_slabs", {0: [room]})
    monkeypatch.setattr(kept, "_used", {0: 0})
    return room


@pytest.fixture
def plan() -> LaunchPlan:
    nothing: Any = SimpleNamespace()
    return LaunchPlan(nothing, 0, (), (), (), (COUNTER,), nothing)


def test_no_two_buffers_share_a_cache_line(slab: torch.Tensor) -> None:
    taken = [kept.take(0, size) for size in (4, 128, 129, 4)]
    assert taken == [slab.data_ptr() + slot * SLOT_BYTES for slot in (0, 1, 2, 4)]


def test_nothing_is_given_that_is_not_there(slab: torch.Tensor) -> None:
    assert kept.take(1, 4) is None  # a device without a slab
    assert all(kept.take(0, 4) for _ in range(SLOTS))
    assert kept.take(0, 4) is None


def test_a_plan_has_one_buffer_for_each_stream_and_one_for_each_captured_launch(
    slab: torch.Tensor, plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "capturing", lambda stream: stream == 9)
    first, again, other = (plan._keep(COUNTER, stream) for stream in (1, 1, 2))
    assert first == again != other
    captured = {plan._keep(COUNTER, 9) for _ in range(3)}
    assert len(captured) == 3
    assert not captured & {first, other}

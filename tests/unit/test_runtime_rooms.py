"""Where the launches of a plan run, and the memory that they work in: streams and threads."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from launch_plans import WORKSPACES, ZEROS, Kernel, encoded, make

from warploom.runtime import driver, kept, launch_plan

__all__ = ["encoded"]  # a fixture


def test_launches_are_configured_once_for_a_stream(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = iter([7, 7, 9, 7, 9])
    monkeypatch.setattr(driver, "current_stream", lambda device: next(streams))
    made = make([], kernel := Kernel())
    for address in (64, 128, 64, 256, 64):
        made.run((address,), (0.5,), lambda: None)
    assert kernel.streams == [7] * 3 + [9] * 3


def test_workspaces_are_apart_and_aligned_and_those_that_are_kept_are_the_streams(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, sizes = [], []

    def used_before(like: torch.Tensor) -> torch.Tensor:
        room = like.new_empty(like.numel() + 512)
        rooms.append(room[-room.data_ptr() % 256 :])  # as aligned as torch's CUDA allocator is
        sizes.append(like.numel())
        return rooms[-1]

    monkeypatch.setattr(launch_plan, "maker", lambda like: partial(used_before, like))
    monkeypatch.setattr(kept, "zeros", lambda device, stream, size: sizes.append(size) or ZEROS)
    kernel = Kernel()
    made = make(WORKSPACES, kernel)
    made.run((64,), (0.5,), lambda: None)
    assert sizes == [1024 + 640, 128 + 384]
    values = kernel.blocks[0]
    assert [values["turns"], values["counter"]] == [ZEROS, ZEROS + 128]
    assert [values["rows"], values["sums"]] == [rooms[0].data_ptr(), rooms[0].data_ptr() + 1024]


def test_threads_share_no_room_on_the_per_thread_default_stream(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes that handle for one stream and reuses at once what a kernel still counts in."""
    monkeypatch.setattr(driver, "current_stream", lambda device: driver.PER_THREAD_STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = Kernel()
    made = make([WORKSPACES[0]], kernel)
    ends, rooms = threading.Barrier(2), []

    def work() -> None:
        rooms.append({made._room(driver.PER_THREAD_STREAM).data_ptr() for _ in range(3)})
        ends.wait(600)  # a thread that has ended needs its room no more

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = rooms
    assert len(first) == len(second) == 1
    assert first != second

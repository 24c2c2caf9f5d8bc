"""A plan binds launches to addresses: its workspaces, its tensor maps, what it remembers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import warploom
from warploom.generator.elements import element
from warploom.generator.launches import Address, Argument, Launch, Workspace
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime import driver, kept
from warploom.runtime import launch_plan as plan
from warploom.runtime.launch_plan import LaunchPlan

WORKSPACES = [
    Workspace("rows", 1000),
    Workspace("turns", 4, kept=True),
    Workspace("sums", 513),
    Workspace("counter", 300, kept=True),
]
ZEROS = 1 << 20  # where the stream has its own
MAP = TensorMap("q", element("bf16"), (8, 8), (16,), (8, 8), 16)
VALUES = {
    "q_map": MAP,
    "scale": Argument("scale"),
    **{workspace.tensor: Address(workspace.tensor) for workspace in WORKSPACES},
}


@dataclass
class Kernel:
    """Stands in for a loaded kernel: keeps what is launched."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)

    def prepare(self, launch: Launch, block: dict[str, Any], device: int, stream: int) -> object:
        self.blocks.append(block)

        def fire() -> None:
            self.fired.append(launch.entry)

        return SimpleNamespace(fire=fire)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that tensor maps were encoded for."""
    addresses: list[int] = []

    def encode(request: TensorMap, pointer: int) -> bytes:
        addresses.append(pointer)
        return b"map"

    monkeypatch.setattr(plan, "encode", encode)
    monkeypatch.setattr(kept, "zeros", lambda device, stream, size: ZEROS)
    monkeypatch.setattr(driver, "current_stream", lambda device: 7)
    monkeypatch.setattr(driver, "enter", lambda device: None)
    block = SimpleNamespace(pack=dict)
    described = SimpleNamespace(parameters=lambda spec: block)
    monkeypatch.setattr(plan, "family", lambda name: described)
    return addresses


def make(workspaces: list[Workspace], kernel: Kernel) -> LaunchPlan:
    spec: Any = SimpleNamespace(operation=SimpleNamespace(family="any"))
    values: Any = {key: VALUES[key] for key in VALUES if key in ("q_map", "scale")}
    values |= {one.tensor: Address(one.tensor) for one in workspaces}
    launches = [Launch(entry, 1, 128, 1, 0, values) for entry in ("before", "main", "after")]
    made = LaunchPlan(spec, 0, ("q",), ("scale",), launches, workspaces, kernel)  # type: ignore[arg-type]
    made._place = torch.device("cpu")
    return made


def test_a_tensor_map_of_several_launches_is_encoded_once(encoded: list[int]) -> None:
    kernel = Kernel()
    made = make([WORKSPACES[1]], kernel)
    made.run((64,), (0.5,), lambda: None)
    assert encoded == [64]
    assert [block["q_map"] for block in kernel.blocks] == [b"map"] * 3
    assert [block["scale"] for block in kernel.blocks] == [0.5] * 3
    made.run((128,), (0.5,), lambda: None)
    assert encoded == [64, 128]
    assert kernel.fired == ["before", "main", "after"] * 2


def test_workspaces_are_apart_and_aligned_and_those_that_are_kept_are_the_streams(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, sizes = [], []

    def used_before(like: torch.Tensor) -> torch.Tensor:
        room = like.new_empty(like.numel() + 512)
        rooms.append(room[-room.data_ptr() % 256 :])  # as aligned as torch's CUDA allocator is
        sizes.append(like.numel())
        return rooms[-1]

    monkeypatch.setattr(torch, "empty_like", used_before)
    monkeypatch.setattr(kept, "zeros", lambda device, stream, size: sizes.append(size) or ZEROS)
    kernel = Kernel()
    made = make(WORKSPACES, kernel)
    made.run((64,), (0.5,), lambda: None)
    assert sizes == [1024 + 640, 128 + 384]
    block = kernel.blocks[0]
    assert [block["turns"], block["counter"]] == [ZEROS, ZEROS + 128]
    assert [block["rows"], block["sums"]] == [rooms[0].data_ptr(), rooms[0].data_ptr() + 1024]


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
        ends.wait(10)  # a thread that has ended needs its room no more

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = rooms
    assert len(first) == len(second) == 1
    assert first != second


def test_what_plans_remember_is_bounded_over_all_of_them(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 plans of 1,024 calls each held 5 GB."""
    monkeypatch.setattr(plan, "_BOUND", 5)
    monkeypatch.setattr(plan, "_bound", known := {})
    plans = [make([], Kernel()) for _ in range(3)]
    for address in range(64, 64 * 9, 64):
        for one in plans:
            one.run((address,), (0.5,), lambda: None)
    assert len(known) == 5


def test_a_check_is_made_for_addresses_and_numbers_that_are_new(encoded: list[int]) -> None:
    checked: list[int] = []
    made = make([], kernel := Kernel())
    for launch in made.launches:
        assert launch.parameters.keys() == {"q_map", "scale"}
    kernel.prepare = lambda launch, *_: SimpleNamespace(fire=lambda: None)  # type: ignore[method-assign]
    for address, scale in ((64, 0.5), (64, 0.5), (128, 0.5), (64, 0.25), (64, 0.5)):
        made.run((address,), (scale,), lambda: checked.append(1))
    assert len(checked) == 3
    with pytest.raises(ValueError, match="no"):
        made.run((256,), (0.5,), lambda: (_ for _ in ()).throw(ValueError("no")))


def test_a_plan_is_shown_as_one_line_with_its_kernel() -> None:
    a, b = torch.zeros(64, 512).bfloat16(), torch.zeros(512, 384).bfloat16()
    shown = repr(warploom.plan(a, b))
    assert shown.startswith("<GemmPlan [64, 384] bf16 on the reference: gemm_sm90a_bf16_")
    q = torch.zeros(2, 4, 48, 64).bfloat16()
    shown = repr(warploom.plan_attention(q, q, q))
    assert shown.startswith("<AttentionPlan [2, 4, 48, 64] on the reference: attention_forward_")
    assert "\n" not in shown

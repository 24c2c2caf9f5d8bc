"""A plan binds launches to addresses: its workspaces, its tensor maps, what it remembers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.generator.elements import element
from warploom.generator.launches import Address, Argument, Launch, Workspace
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime import driver, plan
from warploom.runtime.plan import LaunchPlan

WORKSPACES = [
    Workspace("rows", 1000, zeroed=False),
    Workspace("turns", 4),
    Workspace("sums", 513, zeroed=False),
    Workspace("counter", 300),
]
MAP = TensorMap("q", element("bf16"), (8, 8), (16,), (8, 8), 16)
VALUES = {
    "q_map": MAP,
    "scale": Argument("scale"),
    **{workspace.tensor: Address(workspace.tensor) for workspace in WORKSPACES},
}


@dataclass
class Kernel:
    """Stands in for a loaded kernel: keeps what is launched, and reads workspaces as it would."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)

    def prepare(self, launch: Launch, block: dict[str, Any], device: int, stream: int) -> object:
        self.blocks.append(block)

        def fire() -> None:
            self.fired.append(launch.entry)
            self.seen.append(ctypes.string_at(block["turns"], 4))

        return SimpleNamespace(fire=fire)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that tensor maps were encoded for."""
    addresses: list[int] = []

    def encode(request: TensorMap, pointer: int) -> bytes:
        addresses.append(pointer)
        return b"map"

    monkeypatch.setattr(plan, "encode", encode)
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


def test_workspaces_are_apart_aligned_and_zero_where_they_must_be(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_rooms: list[tuple[str, int]] = []
    empty, zeros = torch.empty, torch.zeros

    def allocate(kind: str) -> Callable[..., torch.Tensor]:
        def make_room(size: int, **keywords: Any) -> torch.Tensor:
            made_rooms.append((kind, size))
            room = empty(size + 512, **keywords).fill_(0 if kind == "zeros" else 255)
            return room[-room.data_ptr() % 256 :]  # as aligned as torch's CUDA allocator is

        return make_room

    monkeypatch.setattr(torch, "empty", allocate("empty"))
    monkeypatch.setattr(torch, "zeros", allocate("zeros"))
    kernel = Kernel()
    made = make(WORKSPACES, kernel)
    made.run((64,), (0.5,), lambda: None)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert made_rooms == [("empty", 1024 + 768), ("zeros", 256 + 512)]
    block = kernel.blocks[0]
    assert all(block[one.tensor] % 256 == 0 for one in WORKSPACES)
    assert block["sums"] - block["rows"] == 1024
    assert block["counter"] - block["turns"] == 256
    assert kernel.seen == [bytes(4)] * 3


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

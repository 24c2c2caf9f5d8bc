"""Plans of kernels that are stood in for, and a driver that shows which tensor maps are encoded."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

from warploom.generator.elements import element
from warploom.generator.launches import Launch, Workspace
from warploom.generator.parameters import (
    ParameterBlock,
    block,
    int32,
    pointer,
    scalar,
    tensor_map,
)
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


@dataclass
class Kernel:
    """Stands in for a loaded kernel: keeps what is launched, and for which streams it was made."""

    block: ParameterBlock = field(init=False)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    def prepare(self, launch: Launch, device: int, stream: int) -> object:
        self.streams.append(stream)

        def fire(arguments: int) -> None:
            self.fired.append(launch.entry)
            self.blocks.append(read(self.block, arguments))

        return SimpleNamespace(fire=fire)


def read(block: ParameterBlock, arguments: int) -> dict[str, Any]:
    """The values of the block that the pointer at `arguments` points to, where a kernel may."""
    start = ctypes.c_uint64.from_address(arguments).value
    assert start % 128 == 0
    found = ctypes.string_at(start, block.size)
    return {
        one.name: struct.unpack_from(f"<{one.kind.format}", found, block.offsets[one.name])[0]
        for one in block.fields
    }


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that tensor maps were encoded for, by a driver that lets one see them."""
    addresses: list[int] = []

    def encode_tiled(*given: Any) -> tuple[int, cuda.CUtensorMap]:
        _, _, pointer, *rest = given
        addresses.append(pointer)
        text = repr([list(map(int, one)) if isinstance(one, list) else one for one in rest])
        made = cuda.CUtensorMap()
        digest = hashlib.sha512(text.encode()).digest()
        ctypes.memmove(made.getPtr(), digest + bytes(56) + struct.pack("<Q", pointer), 128)
        return 0, made

    def replace_address(tensor_map: cuda.CUtensorMap, pointer: int) -> tuple[int]:
        ctypes.memmove(tensor_map.getPtr() + 120, struct.pack("<Q", pointer), 8)
        return (0,)

    monkeypatch.setattr(cuda, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(cuda, "cuTensorMapReplaceAddress", replace_address)
    monkeypatch.setattr(kept, "zeros", lambda device, stream, size: ZEROS)
    monkeypatch.setattr(driver, "current_stream", lambda device: 7)
    monkeypatch.setattr(driver, "enter", lambda device: None)
    monkeypatch.setattr(plan, "_bound", OrderedDict())
    described = SimpleNamespace(parameters=lambda spec: spec.block)
    monkeypatch.setattr(plan, "family", lambda name: described)
    return addresses


def make(workspaces: list[Workspace], kernel: Kernel) -> LaunchPlan:
    kernel.block = block(
        [
            scalar("scale", "A number."),
            tensor_map("q_map", "A tensor map.", lambda at: MAP),
            *(pointer(one.tensor, "float", "A workspace.") for one in workspaces),
            int32("rows_of_q", "A number of the plan.", lambda at: 8),
        ]
    )
    spec: Any = SimpleNamespace(operation=SimpleNamespace(family="any"), block=kernel.block)
    values = kernel.block.values(None)
    launches = [Launch(entry, 1, 128, 1, 0, values) for entry in ("before", "main", "after")]
    made = LaunchPlan(spec, 0, ("q",), ("scale",), launches, workspaces, kernel)  # type: ignore[arg-type]
    made._place = torch.device("cpu")
    return made

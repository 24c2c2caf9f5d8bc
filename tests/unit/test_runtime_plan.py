"""A plan binds launches to addresses: its workspaces, its tensor maps, what it remembers."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

import warploom
from warploom.errors import ProblemError
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
from warploom.runtime.tensor_map import encode

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


def test_calls_at_other_addresses_launch_the_bytes_that_encoding_anew_would_make(
    encoded: list[int],
) -> None:
    """Encoding a tensor map for every new address took longer than torch's whole call."""
    kernel = Kernel()
    made = make([WORKSPACES[1]], kernel)
    asked = [(64, 0.5), (128, 0.5), (1 << 46, 0.25), (64, 0.25)]
    for address, scale in asked:
        made.run((address,), (scale,), lambda: None)
    assert encoded == [64]
    assert kernel.fired == ["before", "main", "after"] * 4
    anew = [
        {"q_map": encode(MAP, address), "turns": ZEROS, "rows_of_q": 8, "scale": scale}
        for address, scale in asked
    ]
    assert kernel.blocks == [values for values in anew for _ in range(3)]


def test_what_a_call_was_launched_with_stays_when_others_come(encoded: list[int]) -> None:
    """Any thread may be launching from it."""
    kernel = Kernel()
    made = make([], kernel)
    _, first = made.run((64,), (0.5,), lambda: None)
    before = read(kernel.block, first[1])
    made.run((128,), (0.25,), lambda: None)
    assert read(kernel.block, first[1]) == before
    assert made.run((64,), (0.5,), lambda: None)[1] is first


def test_launches_of_their_own_parameters_have_their_own_blocks(encoded: list[int]) -> None:
    kernel = Kernel()
    made = make([], kernel)
    before, main, after = made.launches
    other = {**main.parameters, "rows_of_q": 9}
    made.launches = [before, replace(main, parameters=other), after]
    for address in (64, 128):
        made.run((address,), (0.5,), lambda: None)
    assert [values["rows_of_q"] for values in kernel.blocks] == [8, 9, 8] * 2
    assert {values["q_map"] for values in kernel.blocks[3:]} == {encode(MAP, 128)}


def test_a_call_with_an_address_too_few_is_not_launched(encoded: list[int]) -> None:
    """A workspace's address would be taken for a tensor's."""
    made = make([WORKSPACES[1]], kernel := Kernel())
    for given in ((64,), (), (64, 128)):
        if given == (64,):
            made.run(given, (0.5,), lambda: None)
            continue
        with pytest.raises(ValueError, match="in number"):
            made.run(given, (0.5,), lambda: None)
    assert len(kernel.fired) == 3


def test_an_address_that_tma_cannot_read_is_refused_by_name_whenever_it_comes(
    encoded: list[int],
) -> None:
    """The driver is not relied on to refuse what it is given."""
    made = make([], kernel := Kernel())
    for address in (72, 64, 72):
        if address == 64:
            made.run((address,), (0.5,), lambda: None)
            continue
        with pytest.raises(ProblemError, match=r"q at 0x48, pitches .* multiples of 16 bytes"):
            made.run((address,), (0.5,), lambda: None)
    assert kernel.fired == ["before", "main", "after"]


def test_an_address_that_the_driver_does_not_take_is_refused_by_name(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make([], kernel := Kernel())
    made.run((64,), (0.5,), lambda: None)
    invalid = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(cuda, "cuTensorMapReplaceAddress", lambda *_: (invalid,))
    with pytest.raises(ProblemError, match="q at 0x80, pitches"):
        made.run((128,), (0.5,), lambda: None)
    assert len(kernel.fired) == 3


def test_calls_at_new_addresses_leave_nothing_for_the_garbage_collector_to_follow(
    encoded: list[int],
) -> None:
    """A dozen objects of each made it look through the whole process, for 100 ms, now and then."""
    made = make(WORKSPACES[1:2], kernel := Kernel())
    made.run((64,), (0.5,), lambda: None)

    def followed() -> int:
        kernel.blocks.clear()
        for _ in range(2):  # the first looks into a tuple before those that it holds
            gc.collect()
        return len(gc.get_objects())

    before = followed()
    for index in range(2, 202):
        made.run((64 * index,), (0.5,), lambda: None)
    assert len(plan._bound) == 201
    assert followed() - before < 20


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

    monkeypatch.setattr(torch, "empty_like", used_before)
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
    monkeypatch.setattr(plan, "_bound", known := OrderedDict())
    plans = [make([], Kernel()) for _ in range(3)]
    for address in range(64, 64 * 9, 64):
        for one in plans:
            one.run((address,), (0.5,), lambda: None)
    assert len(known) == 5


def test_a_check_is_made_for_addresses_and_numbers_that_are_new(encoded: list[int]) -> None:
    checked: list[int] = []
    made = make([], Kernel())
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

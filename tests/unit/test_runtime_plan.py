"""A plan binds launches to addresses: its tensor maps, and what it remembers."""

from __future__ import annotations

import gc
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from cuda.bindings import driver as cuda
from launch_plans import MAP, WORKSPACES, ZEROS, Kernel, encoded, make, read

import warploom
from warploom.errors import ProblemError
from warploom.runtime import launch_plan as plan
from warploom.runtime.launch_plan import encode

__all__ = ["encoded"]  # a fixture


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
        with pytest.raises(ProblemError, match=r"q at 0x48, strides .* multiples of 16 bytes"):
            made.run((address,), (0.5,), lambda: None)
    assert kernel.fired == ["before", "main", "after"]


def test_an_address_that_the_driver_does_not_take_is_refused_by_name(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make([], kernel := Kernel())
    made.run((64,), (0.5,), lambda: None)
    invalid = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(cuda, "cuTensorMapReplaceAddress", lambda *_: (invalid,))
    with pytest.raises(ProblemError, match="q at 0x80, strides"):
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

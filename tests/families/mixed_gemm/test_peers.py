"""Libraries that few machines have are called with what they take: others stand in for them."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import mixed_stand_in as stand_in
import pytest
import torch
from samplers import constant

from benchmarks.families import Asked
from benchmarks.peers import _mixed_problem
from benchmarks.peers._mixed_codes import Codes
from benchmarks.peers._mixed_contenders import contenders
from benchmarks.peers._mixed_problem import KINDS, quantised
from benchmarks.peers.libraries import humming, machete, marlin
from warploom.runtime.contest import Entry, compete

SHAPE = (5, 192, 256)
M, N, K = SHAPE


@pytest.fixture(autouse=True)
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def small_zeros(weight: torch.Tensor, kind: _mixed_problem.Kind) -> object:
        found = stand_in.random_codes(kind, *weight.shape)
        zeros = None if found.zeros is None else found.zeros.clamp(max=15)
        found = Codes(found.format, found.codes, found.scales, zeros)
        return stand_in.as_packed(found, kind)

    monkeypatch.setattr(_mixed_problem, "packed", small_zeros)
    quantised.cache_clear()
    yield
    quantised.cache_clear()


def measured(kind: str, peer: str) -> Entry:
    found = contenders(KINDS[kind], SHAPE, Asked(peers=(peer,), device="cpu"))
    return compete(kind, {}, found, sampler=constant(1e-5)).entries[1]


def right(entry: Entry) -> bool:
    return entry.absent is None and 0 < (entry.error_share or 0) <= 1


# ---- Marlin --------------------------------------------------------------------------------------


def at(address: ctypes.c_void_p, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that lies at an address."""
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address.value or 0)
    return torch.frombuffer(raw, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "number", "group"),
    [("w4a16", 0, 128), ("w4a16_zeros", 1, 128), ("w8a16", 3, -1), ("mxfp4", 4, 32)],
)
def test_marlin_is_given_addresses_and_extents(
    kind: str, number: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = quantised(KINDS[kind], N, K, "cpu").codes
    words, scales = marlin.marlin_words(codes), marlin.marlin_scales(codes)
    zeros = marlin.marlin_zeros(codes)

    def function(*given: Any) -> int:
        a, b, out, sums, s, s2, z, locks, *numbers, count, _stream, whole = given
        assert numbers == [M, N, K, K, number, group, 0] and (count, whole) == (2, 1)
        assert torch.equal(at(b, words.numel(), torch.int32), words.flatten())
        assert torch.equal(at(s, scales.numel(), scales.dtype), scales.flatten())
        assert s2.value is None and (z.value is None) == (zeros is None)
        if zeros is not None:
            assert torch.equal(at(z, zeros.numel(), torch.int32), zeros.flatten())
        assert at(sums, 4, torch.float32).tolist() == [1] * 4
        assert at(locks, 4, torch.int32).tolist() == [0] * 4
        x = at(a, M * K, torch.bfloat16).view(M, K).double() @ codes.weight().t()
        at(out, M * N, torch.bfloat16).copy_(x.flatten())
        return 0

    memory = 2, torch.zeros(8, dtype=torch.int32), torch.ones(8)
    monkeypatch.setattr(marlin, "_marlin", lambda: (function, lambda: b"no reason"))
    monkeypatch.setattr(marlin, "_marlin_memory", lambda: memory)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    assert right(measured(kind, "marlin"))
    assert measured("w4a8", "marlin").absent == "marlin: not for e4m3 activations on this GPU"
    failing = (lambda *_: 1, lambda: b"n is not divisible")
    monkeypatch.setattr(marlin, "_marlin", lambda: failing)
    assert measured(kind, "marlin").absent == "marlin: n is not divisible"


# ---- Machete -------------------------------------------------------------------------------------


def test_machete_packs_and_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = quantised(KINDS["w4a16"], N, K, "cpu").codes
    seen: list[torch.Tensor] = []

    def prepack(words: torch.Tensor, a: torch.dtype, number: int, s: torch.dtype) -> torch.Tensor:
        assert (a, s) == (torch.bfloat16,) * 2 and number == 2**50 + 2**20 + 2**10
        seen.append(words)
        return words.clone()

    def multiply(a: torch.Tensor, words: torch.Tensor, *given: object) -> torch.Tensor:
        _number, out, scales, zeros, group, *more = given
        assert torch.equal(words, seen[0]) and words.stride() == seen[0].stride()
        assert isinstance(scales, torch.Tensor) and torch.equal(scales, codes.scales.t())
        assert group == 128 and [out, zeros, *more] == [None] * 5
        return (a.double() @ codes.weight().t()).bfloat16()

    operators = SimpleNamespace(machete_prepack_B=prepack, machete_mm=multiply)
    monkeypatch.setattr(machete, "_machete", lambda: operators)
    assert right(measured("w4a16", "machete"))
    assert measured("w4a8", "machete").absent == "machete: not for e4m3 activations here"


# ---- humming -------------------------------------------------------------------------------------


class Layer:
    """What humming's layer takes, and keeps as it is."""

    def __init__(self, **given: Any) -> None:
        self.given, self.locks, self.humming_config = given, "locks", "config"

    def cuda(self) -> Layer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))

    def transform(self) -> None:
        """It keeps what it was given."""


@pytest.mark.parametrize("kind", KINDS)
def test_humming_loads_and_multiplies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = quantised(KINDS[kind], N, K, "cpu")
    codes = given.codes

    def forward(config: object, **named: Any) -> torch.Tensor:
        assert (config, named["locks"]) == ("config", "locks")
        assert json.loads(named["tuning_config"]) == {"m": M}
        expected = humming.humming_tensors(codes)
        assert torch.equal(named["weight"], expected["weight"])
        assert named["weight_scale"].dtype == expected["weight_scale"].dtype
        assert (named["zero_point"] is None) == (codes.zeros is None)
        x = named["inputs"].double() @ codes.weight().t()
        if KINDS[kind].bits == 8:
            assert named["input_scale"].shape == (M, 1)
            x = x * named["input_scale"].double()
        out: torch.Tensor = named["outputs"]
        return out.copy_(x)

    modules: dict[str, Any] = {
        "layer": {"HummingLayer": Layer},
        "tune": {"get_heuristics_config": lambda layer_config, shape_m: {"m": shape_m}},
        "forward": {"humming_forward": forward},
    }
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    for name, members in modules.items():
        module = ModuleType(f"humming.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"humming.{name}", module)
    assert right(measured(kind, "humming"))
    layer = humming.Humming.of(given).layer
    weight = layer.given["weight_config"]
    assert weight.get("group_size", K) == codes.group
    assert (layer.given["shape_n"], layer.given["shape_k"]) == (N, K)
    assert (layer.given["input_config"] is None) == (KINDS[kind].bits != 8)
    assert weight.get("has_zero_point", False) == (codes.zeros is not None)

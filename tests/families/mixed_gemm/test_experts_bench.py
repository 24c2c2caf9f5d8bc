"""The cases of experts with quantized weights: every contender answers rightly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.families import Asked
from benchmarks.peers import _mixed_experts as peer
from benchmarks.peers import _routing
from benchmarks.peers.libraries import humming

OSS = peer.Model(128, 64, 6, 2, peer.BIASED, "mxfp4")
QWEN = peer.Model(128, 256, 6, 2, "silu", "w4a16")


@pytest.mark.parametrize("model", [OSS, QWEN], ids=["gpt-oss", "qwen"])
@pytest.mark.parametrize("part", ["gate_up", "down", "layer"])
def test_our_contenders_are_right(model: peer.Model, part: str) -> None:
    found = peer._contenders(model, part, 7, Asked(device="cpu", peers=("none",)))
    names = ["warploom", "warploom, bf16"] if part == "layer" else ["warploom"]
    assert [one.name for one in found] == names
    for one in found:
        assert one.error_share is not None and one.error_share() <= 1
    assert found[0].told is not None and "mixed_gemm_sm90a" in found[0].told()[0]


def test_a_floor_counts_the_experts_that_are_drawn() -> None:
    tokens, (n, k) = 3, OSS.sizes["down"]
    hit = len(_routing.ids(tokens, 6, 2, 0).unique())
    rows = 2 * tokens * 2 * (n + k)
    assert OSS.moved("down", tokens) == hit * (n * k // 2 + n * k // 32) + rows
    gate_up, down = OSS.moved("gate_up", tokens), OSS.moved("down", tokens)
    assert gate_up < OSS.moved("layer", tokens) < gate_up + down


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """humming's functions by the shapes and keywords that version 0.1.19 has."""

    class Layer:
        def __init__(self, **told: Any) -> None:
            assert told["num_experts"] == 6 and told["shape_n"] == 128
            self.humming_config = self
            self.locks = torch.zeros(1)

        def cuda(self) -> Layer:
            return self

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            self.weight = SimpleNamespace(data=tensors["weight"])
            self.weight_scale = SimpleNamespace(data=tensors["weight_scale"])

        def transform(self) -> None:
            pass

    def forward(config: Layer, **told: Any) -> torch.Tensor:
        rows, out = told["inputs"], told["outputs"]
        if "indexed" in told["compute_config"]:
            assert int(told["num_tokens_padded"]) == len(told["sorted_ids"])
            blocks = told["sorted_ids"].view(len(told["expert_ids"]), 8)
            pairs = zip(blocks, told["expert_ids"], strict=True)
            places = [(block[block < len(rows)].long(), int(e)) for block, e in pairs]
        else:
            ends = told["expert_layout"]
            assert ends.dtype == torch.int64 and len(ends) == 7
            places = [(torch.arange(*ends[e : e + 2]), e) for e in range(6)]
        for place, expert in places:
            out[place] = rows[place] @ config.wide[expert].mT
        return out

    tuned = {"block_shape": [8, 64, 64]}
    modules = {
        "humming.layer": SimpleNamespace(HummingLayer=Layer),
        "humming.forward": SimpleNamespace(humming_forward=forward),
        "humming.tune": SimpleNamespace(get_heuristics_config=lambda **_: tuned),
    }
    monkeypatch.setattr(humming, "imported", lambda _, module: modules[module])
    packed = peer._weights(OSS, "cpu").down
    monkeypatch.setattr(Layer, "wide", peer._dequantized(packed), raising=False)


def test_both_ways_of_humming_are_given_the_rows_of_each_expert(library: None) -> None:
    """Guards against a layout of experts that its kernels would read otherwise."""
    found = peer._contenders(OSS, "down", 7, Asked(device="cpu", peers=("humming",)))
    assert [one.name for one in found] == ["warploom", *(f"humming, {w}" for w in humming.WAYS)]
    for one in found:
        assert one.error_share is not None and one.error_share() <= 1

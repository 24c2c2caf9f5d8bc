"""The cases of experts with quantized weights: every contender answers rightly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samplers import assert_right

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
    beside = ["warploom, bf16"] if part == "layer" else []
    assert_right(found, ["warploom", *beside], "mixed_gemm_sm90a")


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

    wide = peer._dequantized(peer._weights(OSS, "cpu").down)

    def layer(**told: Any) -> SimpleNamespace:
        assert told["num_experts"] == len(wide) and told["shape_n"] == wide.shape[1]
        made = SimpleNamespace(humming_config=None, locks=None, transform=lambda: None)
        made.cuda, made.load_from_tensors = (lambda: made), (lambda tensors: None)
        return made

    def forward(_: None, **told: Any) -> None:
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
            out[place] = rows[place] @ wide[expert].mT

    tuned = {"block_shape": [8, 64, 64]}
    modules = {
        "humming.layer": SimpleNamespace(HummingLayer=layer),
        "humming.forward": SimpleNamespace(humming_forward=forward),
        "humming.tune": SimpleNamespace(get_heuristics_config=lambda **_: tuned),
    }
    monkeypatch.setattr(humming, "imported", lambda _, module: modules[module])


def test_both_ways_of_humming_are_given_the_rows_of_each_expert(library: None) -> None:
    """Guards against a layout of experts that its kernels would read otherwise."""
    found = peer._contenders(OSS, "down", 7, Asked(device="cpu", peers=("humming",)))
    names = ["warploom", *(f"humming, {way}" for way in humming.WAYS)]
    assert_right(found, names, "mixed_gemm_sm90a")

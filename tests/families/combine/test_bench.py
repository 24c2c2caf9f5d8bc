"""The cases of the family: what is measured beside transformers' ways answers rightly."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from samplers import assert_right, constant

from benchmarks.families import Asked
from benchmarks.peers import combine as peer
from benchmarks.peers.libraries import vllm_fused_moe
from warploom.runtime.contest import compete


@pytest.mark.parametrize("peers", [(), ("batched_mm",)])
def test_every_way_that_was_asked_for_runs_a_layer_rightly(
    peers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_fused_moe, "imported", _vllm)
    found = peer._contenders(peer.Sizes(13, 64, 48, 6, 2), Asked(device="cpu", peers=peers))
    names = peers or ("grouped_mm", "fused_moe", "batched_mm")
    assert_right(found, ["warploom", *names], "gemm_sm90a_bf16")


def _vllm(library: str, module: str) -> SimpleNamespace:
    """vLLM's module, whose function takes weights before ids, which are int32."""
    assert (library, module) == ("vllm", "vllm.model_executor.layers.fused_moe")

    def fused_experts(
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        assert topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32
        return peer.loop(hidden_states, topk_ids, topk_weights, w1, w2)

    return SimpleNamespace(fused_experts=fused_experts)


def test_a_machine_without_vllm_has_no_fused_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an import error that ends the run."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    asked = Asked(device="cpu", peers=("fused_moe",))
    made = peer._contenders(peer.Sizes(13, 64, 48, 6, 2), asked)
    case = compete("combine", {}, made, sampler=constant(1e-5))
    (absent,) = [one.absent for one in case.entries if one.contender == "fused_moe"]
    assert absent is not None and absent.startswith("vllm: ModuleNotFoundError")


@pytest.mark.parametrize("is_eager", [True, False])
def test_every_way_of_training_a_layer_has_its_gradients(is_eager: bool) -> None:
    found = peer._trained(peer.Sizes(29, 64, 48, 6, 2), is_eager, Asked(device="cpu"))
    names = ["warploom", peer.IN_FP8, "grouped_mm", *(["loop"] if is_eager else [])]
    assert_right(found, names, "gemm_sm90a_bf16")
    assert found[1].told is not None and "e4m3" in found[1].told()[0]


def test_a_floor_counts_the_experts_that_are_drawn() -> None:
    """Guards against a floor above a time: the mean of all routings reads more than some do."""
    sizes = peer.Sizes(16, 64, 48, 32, 2)
    drawn = peer._drawn(sizes, "cpu")[0]
    assert sizes.weight_bytes == 2 * 3 * 64 * 48 * len(drawn.ids.unique())

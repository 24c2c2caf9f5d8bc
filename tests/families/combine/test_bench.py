"""The cases of the family: what is measured beside transformers' ways answers rightly."""

from __future__ import annotations

import pytest
from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import combine as peer


@pytest.mark.parametrize("peers", [(), ("batched_mm",)])
def test_every_way_that_was_asked_for_runs_a_layer_rightly(peers: tuple[str, ...]) -> None:
    found = peer._contenders(peer.Sizes(13, 64, 48, 6, 2), Asked(device="cpu", peers=peers))
    names = peers or ("grouped_mm", "batched_mm")
    assert_right(found, ["warploom", *names], "gemm_sm90a_bf16")


@pytest.mark.parametrize("is_eager", [True, False])
def test_every_way_of_training_a_layer_has_its_gradients(is_eager: bool) -> None:
    found = peer._trained(peer.Sizes(29, 64, 48, 6, 2), is_eager, Asked(device="cpu"))
    names = ["warploom", "grouped_mm", "loop"] if is_eager else ["warploom", "grouped_mm"]
    assert_right(found, names, "gemm_sm90a_bf16")


def test_a_floor_counts_the_experts_that_are_drawn() -> None:
    """Guards against a floor above a time: the mean of all routings reads more than some do."""
    sizes = peer.Sizes(16, 64, 48, 32, 2)
    drawn = peer._drawn(sizes, "cpu")[0]
    assert sizes.weight_bytes == 2 * 3 * 64 * 48 * len(drawn.ids.unique())

"""The cases of the family: what is measured beside transformers' ways answers rightly."""

from __future__ import annotations

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import combine as peer


def test_the_cases_are_those_of_the_list() -> None:
    assert not list(runner.cases(runner.named(["combine"]), Asked()))  # but where they are named
    cases = list(peer.layers(Asked()))
    assert [case.name for case in cases][:2] == [
        "Qwen3-30B-A3B 1 tokens",
        "Qwen3-30B-A3B 16 tokens",
    ]
    assert len(cases) == 18
    assert {case.floor.limit for case in cases if case.floor} == {"bytes", "flops"}
    assert all(peer.FAMILY.subject(case.problem) for case in cases)


def test_every_way_of_running_a_layer_is_right() -> None:
    found = peer._contenders(peer.Sizes(13, 64, 48, 6, 2), Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "grouped_mm", "batched_mm"]
    for one in found:
        assert one.error_share is not None and one.error_share() <= 1
        one.calls[0]()
    assert found[0].told is not None and "gemm_sm90a_bf16" in found[0].told()[0]


def test_only_the_peers_that_were_asked_for_are_measured() -> None:
    """Guards against `--peers` that changes nothing."""
    asked = Asked(device="cpu", peers=("batched_mm",))
    found = peer._contenders(peer.Sizes(3, 64, 48, 6, 2), asked)
    assert [one.name for one in found] == ["warploom", "batched_mm"]


@pytest.mark.parametrize("is_eager", [True, False])
def test_every_way_of_training_a_layer_has_its_gradients(is_eager: bool) -> None:
    found = peer._trained(peer.Sizes(29, 64, 48, 6, 2), is_eager, Asked(device="cpu"))
    names = ["warploom", "grouped_mm", "loop"] if is_eager else ["warploom", "grouped_mm"]
    assert [one.name for one in found] == names
    for one in found:
        results = one.calls[0]()
        assert isinstance(results, tuple) and len(results) == 5
        assert one.error_share is not None and one.error_share() <= 1


def test_a_floor_counts_the_experts_that_are_drawn() -> None:
    """Guards against a floor above a time: the mean of all routings reads more than some do."""
    sizes = peer.Sizes(16, 64, 48, 32, 2)
    drawn = peer._drawn(sizes, "cpu")[0]
    assert sizes.weight_bytes == 2 * 3 * 64 * 48 * len(drawn.ids.unique())


def test_the_cases_of_training_are_timed_as_graphs_and_with_the_host() -> None:
    cases = list(peer.training(Asked(m=(64,))))
    assert [case.problem["way"] for case in cases] == ["CUDA graph", "eager"]
    assert cases[0].sampler is not cases[1].sampler

"""The cases of the family: what is measured beside transformers' ways answers rightly."""

from __future__ import annotations

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
    found = peer._contenders((13, 64, 48, 6, 2), Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "grouped_mm", "batched_mm"]
    for one in found:
        assert one.error_share is not None and one.error_share() <= 1
        one.calls[0]()

"""The cases of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import route as peer
from warploom.generator.families.route import RouteShape


def test_the_cases_are_those_of_the_list() -> None:
    assert not list(runner.cases(runner.named(["route"]), Asked()))  # but where they are named
    cases = list(peer.cases(Asked(m=(7,))))
    assert [case.name for case in cases] == [
        "Qwen3-30B-A3B 7 tokens, 8 of 128 experts",
        "GPT-OSS-120B 7 tokens, 4 of 128 experts",
        "DeepSeek-V3 / 8 7 tokens, 8 of 32 experts",
    ]
    assert all(peer.FAMILY.subject(case.problem) for case in cases)


def test_every_way_of_routing_is_right() -> None:
    """Ids that repeat in a token are in the order of their choices."""
    found = peer.contenders(RouteShape(61, 4, 6), 0, Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "torch"]
    for one in found:
        assert one.error_share is not None and one.error_share() == 0

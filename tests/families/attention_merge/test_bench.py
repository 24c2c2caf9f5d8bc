"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import attention_merge as peer
from warploom.generator.families.attention_merge import AttentionMergeShape


def test_the_cells_are_those_of_the_list() -> None:
    cases = list(runner.cases(runner.named(["attention_merge"]), Asked()))
    assert [case.name for case in cases][:2] == ["bf16 2048x128", "bf16 32768x128"]
    assert len(cases) == 6
    for case in cases:
        assert case.floor is not None and case.floor.limit == "bytes"
        assert peer.FAMILY.subject(case.problem) and peer.FAMILY.division(case.problem)


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_our_contender_is_right_and_torchs_too_where_it_rounds_once(name: str) -> None:
    found = peer.contenders(peer.OPERATIONS[name], AttentionMergeShape(40), Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "torch"]
    for one in found:
        assert one.error_share is not None and one.error_share() <= 1
        one.calls[0]()
    assert found[0].told is not None and "attention_merge" in found[0].told()[0]

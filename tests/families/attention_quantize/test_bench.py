"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import attention_quantize as peer
from warploom.generator.families.attention_quantize import AttentionQuantizeShape


def test_the_cells_are_those_of_the_list() -> None:
    cases = list(runner.cases(runner.named(["attention_quantize"]), Asked()))
    assert [case.name for case in cases][:2] == [
        "int8, smoothed d64 1024",
        "int8, smoothed d64 4096",
    ]
    assert len(cases) == 27
    for case in cases:
        assert case.floor is not None and case.floor.limit == "bytes"
        assert peer.FAMILY.subject(case.problem) and peer.FAMILY.division(case.problem)


@pytest.mark.parametrize("name", peer.operations(64))
def test_our_contender_and_torchs_are_right(name: str) -> None:
    operation = peer.operations(64)[name]
    heads, rows = (4, 70) if operation.quantizes else (0, 0)
    shape = AttentionQuantizeShape(2, heads, 2, rows, 200)
    found = peer.contenders(operation, shape, Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "torch", "copy"]
    for one in found:
        one.calls[0]()
        assert one.error_share is None or one.error_share() <= 1
    assert found[0].told is not None and "attention_quantize" in found[0].told()[0]

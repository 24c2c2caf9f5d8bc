"""The cells of the family: what is measured beside torch's operators answers rightly."""

from __future__ import annotations

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import activation_backward as peer
from warploom.generator.families.activation_backward import ActivationBackwardShape


def test_the_cells_are_those_of_the_list() -> None:
    cases = list(runner.cases(runner.named(["activation_backward"]), Asked()))
    assert [case.name for case in cases][:2] == ["gelu_tanh 8192x4096", "gelu_tanh 2048x14336"]
    assert len(cases) == 8
    for case in cases:
        assert case.floor is not None and case.floor.limit == "bytes"
        assert peer.FAMILY.subject(case.problem) and peer.FAMILY.division(case.problem)


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_both_contenders_are_right(name: str) -> None:
    shape = ActivationBackwardShape(40, 24)
    found = peer.contenders(peer.OPERATIONS[name], shape, Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "torch"]
    for one in found:
        assert one.error_share is not None and one.error_share() <= 1
        one.calls[0]()
    assert found[0].told is not None and "activation_backward" in found[0].told()[0]

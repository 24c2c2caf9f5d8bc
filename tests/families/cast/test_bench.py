"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import cast as peer
from warploom.generator.families.cast import CastShape


def test_the_cells_are_those_of_the_list() -> None:
    cases = list(runner.cases(runner.named(["cast"]), Asked()))
    assert [case.name for case in cases][:2] == ["1x128 8192x4096", "1x128 8192x14336"]
    assert len(cases) == 40
    for case in cases:
        assert case.floor is not None and case.floor.limit == "bytes"
        assert peer.FAMILY.subject(case.problem) and peer.FAMILY.division(case.problem)


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_our_contender_and_torchs_are_right(name: str) -> None:
    contenders = peer.contenders(name, CastShape(128, 256), Asked(device="cpu"))
    assert contenders[0].name == "warploom" and contenders[-1].name == "copy"
    for one in contenders:
        if one.name == "torchao":  # which runs on GPUs alone
            continue
        one.calls[0]()
        assert one.error_share is None or one.error_share() == 0
    assert contenders[0].told is not None and "cast_sm90a" in contenders[0].told()[0]

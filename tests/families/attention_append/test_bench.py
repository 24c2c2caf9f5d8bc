"""The cells of the family: what is measured beside torch's operations leaves the same bits."""

from __future__ import annotations

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import attention_append as peer
from warploom.generator.families.attention_append import AttentionAppendShape
from warploom.runtime.families.attention_append.trial import filled, written


def test_the_cells_are_those_of_the_list() -> None:
    cases = list(runner.cases(runner.named(["attention_append"]), Asked()))
    assert [case.name for case in cases][:2] == ["bf16 1 tokens", "bf16 32 tokens"]
    assert len(cases) == 8
    for case in cases:
        assert case.floor is not None and case.floor.limit == "bytes"
        assert peer.FAMILY.subject(case.problem) and peer.FAMILY.division(case.problem)


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("name", peer.operations())
def test_both_contenders_leave_what_the_reference_does(name: str, tokens: int) -> None:
    shape, operation = AttentionAppendShape(tokens, 2, 4), peer.operations()[name]
    found = peer.contenders(operation, shape, Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "torch"]
    for one in found:
        assert one.error_share is not None and one.error_share() == 0
    assert found[0].told is not None and "attention_append" in found[0].told()[0]
    call = found[0].calls[0].args[0]  # type: ignore[attr-defined]
    for one in written(call).values():
        filled(one)
    assert peer.wrong(call, lambda: None) > 1

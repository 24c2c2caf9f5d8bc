"""The cells of the family: what is measured beside torch's operations leaves the same bits."""

from __future__ import annotations

import pytest
from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import attention_append as peer
from warploom.generator.families.attention_append import AttentionAppendShape
from warploom.runtime.families.attention_append.family import filled, written


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("name", peer.operations())
def test_both_contenders_leave_what_the_reference_does(name: str, tokens: int) -> None:
    shape, operation = AttentionAppendShape(tokens, 2, 4), peer.operations()[name]
    found = peer.contenders(operation, shape, Asked(device="cpu"))
    assert_right(found, ["warploom", "torch"], "attention_append")
    call = found[0].calls[0].args[0]  # type: ignore[attr-defined]
    for one in written(call).values():
        filled(one)
    assert peer.wrong(call, lambda: None) > 1

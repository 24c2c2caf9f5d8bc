"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

import pytest
from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import attention_merge as peer
from warploom.generator.families.attention_merge import AttentionMergeShape


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_our_contender_is_right_and_torchs_too_where_it_rounds_once(name: str) -> None:
    found = peer.contenders(peer.OPERATIONS[name], AttentionMergeShape(40), Asked(device="cpu"))
    assert_right(found, ["warploom", "torch"], "attention_merge")

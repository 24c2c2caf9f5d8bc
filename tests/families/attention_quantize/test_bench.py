"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

import pytest
from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import attention_quantize as peer
from warploom.generator.families.attention_quantize import AttentionQuantizeShape


@pytest.mark.parametrize("name", peer.operations(64))
def test_our_contender_and_torchs_are_right(name: str) -> None:
    operation = peer.operations(64)[name]
    heads, rows = (4, 70) if operation.quantizes else (0, 0)
    shape = AttentionQuantizeShape(2, heads, 2, rows, 200)
    found = peer.contenders(operation, shape, Asked(device="cpu"))
    assert_right(found, ["warploom", "torch", "copy"], "attention_quantize")

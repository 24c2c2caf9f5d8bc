"""The cells of the family: what is measured beside torch's operators answers rightly."""

from __future__ import annotations

import pytest
from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import activation_backward as peer
from warploom.generator.families.activation_backward import ActivationBackwardShape


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_both_contenders_are_right(name: str) -> None:
    shape = ActivationBackwardShape(40, 24)
    found = peer.contenders(peer.OPERATIONS[name], shape, Asked(device="cpu"))
    assert_right(found, ["warploom", "torch"], "activation_backward")

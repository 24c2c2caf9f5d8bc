"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from samplers import assert_right, constant

from benchmarks.families import Asked
from benchmarks.peers import cast as peer
from warploom.generator.families.cast import CastShape
from warploom.runtime.contest import compete


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_our_contender_and_torchs_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "compiled", lambda make: make())
    asked = Asked(device="cpu", peers=("torch", "torch.compile"))  # torchao runs on GPUs alone
    peers = [] if "stochastic" in name else asked.peers
    found = peer.contenders(name, CastShape(128, 256), asked)
    assert_right(found, ["warploom", *peers, "copy"], "cast_sm90a")


def test_a_table_has_the_share_of_a_copy() -> None:
    entries = [
        {"contender": name, "seconds": seconds}
        for name, seconds in (("warploom", 2e-5), ("torchao", None), ("copy", 1.8e-5))
    ]
    assert peer.FAMILY.further({"entries": entries}) == {"of a copy's rate": "0.90"}


def test_a_size_that_torchao_refuses_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an assertion of its own ending the run."""

    def refused(x: torch.Tensor) -> None:
        raise AssertionError("First dimension size must be divisible by block_size")

    library = SimpleNamespace(triton_fp8_blockwise_act_quant_transposed_lhs=refused)
    monkeypatch.setattr(peer, "imported", lambda *_: library)
    asked = Asked(device="cpu", peers=("torchao",))
    made = peer.contenders(peer.ALONE, CastShape(16, 128), asked)
    cell = compete("cast", {}, made, sampler=constant(1e-5))
    (absent,) = [one.absent for one in cell.entries if one.contender == "torchao"]
    assert absent is not None and absent.startswith("torchao: First dimension")

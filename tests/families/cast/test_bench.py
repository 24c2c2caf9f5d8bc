"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from samplers import assert_right, constant

from benchmarks.families import Asked
from benchmarks.peers import _routing
from benchmarks.peers import cast as peer
from benchmarks.peers._routing import Routed
from warploom.generator.families.cast import CastShape
from warploom.runtime.contest import Contender, compete
from warploom.runtime.families.cast.call import call_of


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_our_contender_and_torchs_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "compiled", lambda make: make())
    asked = Asked(device="cpu", peers=("torch", "torch.compile"))  # torchao runs on GPUs alone
    peers = [] if "stochastic" in name else asked.peers
    found = peer.contenders(name, CastShape(128, 256), asked)
    assert_right(found, ["warploom", *peers, "copy"], "cast_sm90a")


@pytest.mark.parametrize("name", peer.GROUPED)
@pytest.mark.parametrize("routed", ["even", "zipf"])
def test_every_contender_of_groups_is_right(
    name: str, routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows that are padded elsewhere than the kernel puts them."""
    monkeypatch.setattr(peer, "compiled", lambda make: make())
    asked = Asked(device="cpu", peers=("torch", "torch.compile"))
    found = peer._contenders_of_groups(name, CastShape(300, 256), 5, routed, asked)
    names = [f"{one}, rows padded before" for one in asked.peers]
    assert_right(found, ["warploom", *names, "copy"], "cast_sm90a")


@pytest.mark.parametrize("place", range(5))
def test_a_result_of_groups_that_is_wrong_fails_its_check(place: int) -> None:
    """Guards against a check that leaves a result out."""
    x, ends = torch.randn(300, 256).bfloat16(), _routing.ends(300, 5, "zipf", 0)
    given = call_of(x, torch.float8_e4m3fn, block="1x128", transpose=True, offsets=ends)
    found = [*peer.ours([given]).calls[0]()]  # type: ignore[misc]
    found[place] = found[place].float().roll(1, 0)
    assert peer._share_of_groups(Contender("wrong", [lambda: found]), given) > 1


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

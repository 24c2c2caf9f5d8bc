"""The cells of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from samplers import constant

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import cast as peer
from warploom.generator.families.cast import CastShape
from warploom.runtime.contest import compete


def test_the_cells_are_those_of_the_list() -> None:
    cases = list(runner.cases(runner.named(["cast"]), Asked()))
    assert [case.name for case in cases][:2] == ["1x128 8192x4096", "1x128 8192x14336"]
    assert len(cases) == 44
    for case in cases:
        assert case.floor is not None and case.floor.limit == "bytes"
        assert peer.FAMILY.subject(case.problem) and peer.FAMILY.division(case.problem)


@pytest.mark.parametrize("name", peer.OPERATIONS)
def test_our_contender_and_torchs_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "compiled", lambda make: make())
    contenders = peer.contenders(name, CastShape(128, 256), Asked(device="cpu"))
    assert contenders[0].name == "warploom" and contenders[-1].name == "copy"
    for one in contenders:
        if one.name == "torchao":  # which runs on GPUs alone
            continue
        one.calls[0]()
        assert one.error_share is None or one.error_share() == 0
    assert contenders[0].told is not None and "cast_sm90a" in contenders[0].told()[0]


def test_a_table_has_the_share_of_a_copy() -> None:
    entries = [
        {"contender": name, "seconds": seconds}
        for name, seconds in (("warploom", 2e-5), ("torchao", None), ("copy", 1.8e-5))
    ]
    assert peer.FAMILY.further({"entries": entries}) == {"of a copy's rate": "0.90"}


def test_what_writes_one_orientation_is_held_against_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against q being compared with q of x.T, where a peer computes the latter alone."""
    monkeypatch.setattr(peer, "compiled", lambda make: make())
    shape = CastShape(128, 128)
    found = peer.contenders(peer.ALONE, shape, Asked(device="cpu", peers=("torch",)))
    torchs = {one.name: one for one in found}["torch"]
    (call, *_) = torchs.calls
    results = call()
    assert isinstance(results, tuple) and len(results) == 2
    results[0].zero_()
    assert torchs.error_share is not None and torchs.error_share() == 0


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

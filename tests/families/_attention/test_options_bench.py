"""Attention with options as it is measured, but for the GPU: cells, contenders, checks, peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samplers import constant
from torch.nn.attention import SDPBackend

import warploom
from benchmarks import runner, tables, wording
from benchmarks.families import Asked, Case, family_of
from benchmarks.peers import _options, _options_problem
from benchmarks.peers._attention_baseline import Attend
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._libraries import NAMES, OPTIONS
from benchmarks.peers._options_given import Given, Shared
from benchmarks.peers._options_problem import KINDS, LISTED, Option, options, pattern
from benchmarks.peers.libraries import triton
from benchmarks.peers.libraries.torch_kernels import with_option
from benchmarks.protocol import Record, read
from warploom.runtime.contest import Cell, Floor

PLAIN = Attention("small", 2, 2, 2, 96, 64)
CAUSAL = Attention("small causal", 2, 2, 2, 96, 64, causal=True)
MANY = Attention("causal", 2, 2, 2, 512, 64, causal=True)
GROUPED = Attention("small grouped", 2, 4, 2, 96, 64, causal=True, window=15)
OF_KIND = dict.fromkeys(KINDS, PLAIN) | {"dropout": CAUSAL, "alibi": CAUSAL, "sinks": GROUPED}
SMALL = [Option(one, kind) for kind, one in OF_KIND.items()]
EACH = pytest.mark.parametrize("problem", SMALL, ids=lambda one: one.kind)
BOTH = pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lists = {"block": 16, "share": 0.5, "documents": 3, "prefix": 0.25}
    monkeypatch.setitem(LISTED, "lists", lists)
    yield


def measured(problem: Option, *, both: bool, **asked: Any) -> Cell:
    about = Asked(**{"peers": ("none",), "device": "cpu", **asked})

    def make(one: Asked) -> list[Any]:
        return list(_options.contenders(problem, one, both=both))

    case = Case(problem.name, problem.record("both", 7), Floor.of(1.0), make, gradients=both)
    return runner.measure(case, about, constant(1e-5))


def first(problem: Option) -> Given:
    return Given(Shared(problem, "cpu"))


# ---- Cells ---------------------------------------------------------------------------------------


def listed(name: str, **asked: Any) -> list[Case]:
    return list(runner.cases(runner.named([name]), Asked(cells=("options",), **asked)))


@pytest.mark.parametrize("kind", ["documents", "prefix", "random"])
def test_flops_are_those_of_the_scores_that_lists_of_blocks_show(kind: str) -> None:
    problem = Option(PLAIN, kind)
    shown, place = pattern(problem, "cpu"), torch.arange(PLAIN.seq)
    assert shown is not None
    scores = int(shown(place[:, None], place).sum())
    assert problem.flops == 4 * PLAIN.dim * PLAIN.batch * PLAIN.heads * scores
    assert 0 < problem.flops < problem.record("forward", 2)["flops_without"] == PLAIN.flops


def test_a_quarter_of_the_blocks_is_a_quarter_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = _options_problem.drawn_blocks(8192)
    assert {len(row) for row in rows} == {16} and len(rows) == 64
    (cell, _) = (one for one in options(both=False) if one.kind == "random")
    assert 4 * cell.flops == cell.attention.flops
    assert sum(_options_problem.documents(8192)) == 8192


def test_a_run_is_recorded_and_shown_with_the_share_of_the_rate_without(tmp_path: Path) -> None:
    record = Record(tmp_path / "result.json", "bench_attention", {})
    for problem in (Option(CAUSAL, "dropout"), Option(PLAIN, "random")):
        cell = measured(problem, both=False)
        about = {"family": "attention_forward", "cells": "options", **cell.problem}
        record.add(Cell(cell.name, about, cell.entries, cell.floor))
    cells = read(record.path)["cells"]
    ((title, own),) = wording.sections({"cells": cells}).items()
    assert title == f"Attention forward, bf16, {_options.TITLE}"
    columns, rows = tables.of_cells(own)
    assert "Warploom without us" in columns
    shares = [row[columns.index("of the rate without")] for row in rows]
    assert shares == ["1.00", "0.50"]  # the same times, of half the work
    assert {family_of(one).division(one["problem"]) for one in cells} == {
        "dropout",
        "block masks",
    }


# ---- Contenders ----------------------------------------------------------------------------------


@EACH
@BOTH
def test_warploom_is_right_with_each_option_and_without(problem: Option, both: bool) -> None:
    ours, without = measured(problem, both=both).entries
    assert (ours.contender, without.contender) == ("warploom", "warploom, without")
    for one in (ours, without):
        assert one.absent is None and 0 < (one.error_share or 0) <= 1, one
    kernels = str(ours.kernel).split(", ")
    assert [name.partition("_sm90a")[0] for name in kernels] == [
        "attention_forward",
        *["attention_backward"] * both,
    ]


@EACH
def test_an_option_that_is_left_out_shows(problem: Option) -> None:
    """Were it read from the wrong place, or not at all, the plain attention would be measured."""
    one = first(problem)
    without = Given(Shared(Option(problem.attention), "cpu"), one)
    found = {}
    for both in (False, True):
        run = _options.Run(one, own := _options.Ours(one, both=both), both=both)
        plain = _options.Run(without, _options.Ours(without, both=both), both=both)
        with torch.set_grad_enabled(both):
            run()
            plain()
        found[both] = [*plain.found, *run.found[len(plain.found) :]]
        assert one.share(run.found, both=both, state=own.state) <= 1
        assert one.share(found[both], both=both, state=own.state) > 1


@pytest.mark.parametrize("kind", ["sinks", "bias_gradient"])
def test_a_wrong_gradient_of_what_batches_share_shows(kind: str) -> None:
    torch.manual_seed(0)  # a gradient that happens to be near 0 is near its half
    (problem,) = (one for one in SMALL if one.kind == kind)
    run = _options.Run(one := first(problem), _options.Ours(one, both=True), both=True)
    run()
    *others, last = run.found
    assert last.shape == one.shared.read[problem.differentiated].shape
    for wrong in (last + 0.25, last / problem.attention.batch, torch.full_like(last, torch.nan)):
        assert one.share([*others, wrong], both=True, state=None) > 1


def test_another_mask_of_dropout_shows() -> None:
    run = _options.Run(
        one := first(Option(CAUSAL, "dropout")), own := _options.Ours(one, both=False), both=False
    )
    run()
    assert own.state is not None
    assert one.share(run.found, both=False, state=own.state) <= 1
    assert one.share(run.found, both=False, state=own.state + 1) > 1
    before = own.state
    run()
    assert not torch.equal(own.state, before)  # each call drops others


def test_a_kernel_competes_where_it_computes_the_cell() -> None:
    problem = Option(CAUSAL, "dropout")
    name = str(measured(problem, both=False).entries[0].kernel)
    spec = warploom.generator.specification.parse_name(name)
    entries = measured(problem, both=False, specs=(spec,)).entries
    assert entries[-1].contender == name and entries[-1].right
    entries = measured(Option(CAUSAL, "alibi"), both=False, specs=(spec,)).entries
    assert name not in [one.contender for one in entries]


# ---- Peers ---------------------------------------------------------------------------------------


@BOTH
def test_peers_with_masks_of_their_own_are_held_by_a_mean(both: bool) -> None:
    one = first(Option(CAUSAL, "dropout"))

    def attend(scale: float) -> Attend:
        def of(given: Given, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            assert given is one
            q, k, v = (tensors[name] for name in "qkv")
            return warploom.attention(q, k, v, causal=True) * scale

        return of

    assert _options.mean_share(one, attend(1.0), both=both) < 1
    assert _options.mean_share(one, attend(0.9), both=both) > 1
    assert _options.mean_share(one, attend(math.nan), both=both) == math.inf


def _asked_of(word: str) -> list[Option]:
    return [one for one in SMALL if word in _options.BESIDE[one.listed]]


def test_every_list_of_cells_has_peers_that_there_are() -> None:
    assert _options.BESIDE.keys() == {kind.listed for kind in KINDS.values()}
    for words in _options.BESIDE.values():
        assert set(words) <= OPTIONS.keys() <= NAMES.keys()


@pytest.mark.parametrize("problem", _asked_of("cudnn"), ids=lambda one: one.kind)
@BOTH
def test_torchs_function_is_asked_for_what_is_measured(
    problem: Option, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its plain backend, which has every mask and bias, and their gradients."""
    if problem.kind == "dropout":  # a mean of so many weights is within 1 % by 8 deviations
        problem = Option(MANY, "dropout")
    plain = with_option(SDPBackend.MATH)
    monkeypatch.setitem(OPTIONS, "cudnn", ("cuDNN", lambda: plain))
    _, entry, _ = measured(problem, both=both, peers=("cudnn",)).entries
    assert entry.contender == "cuDNN" and entry.right, entry


@pytest.mark.parametrize("problem", _asked_of("triton"), ids=lambda one: one.kind)
def test_flex_attention_is_asked_for_what_is_measured(
    problem: Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward pass: torch differentiates it on a GPU only."""

    def plain(make: Callable[[], Callable[..., torch.Tensor]]) -> Callable[..., torch.Tensor]:
        return make()

    monkeypatch.setattr(triton, "compiled", plain)
    _, entry, _ = measured(problem, both=False, peers=("triton",)).entries
    assert entry.contender == "Triton" and entry.right, entry


def test_a_peer_that_is_missing_says_so() -> None:
    entries = measured(Option(GROUPED, "sinks"), both=False, peers=("fa4",)).entries
    absent = {one.contender: one.absent for one in entries}["FlashAttention-4"]
    assert absent is not None and "flash_attn" in absent
    for both in (False, True):
        entries = measured(Option(CAUSAL, "alibi"), both=both, peers=("fa2",)).entries
        assert {one.contender: one.absent for one in entries}["FlashAttention-2"]

"""The benchmark of gradients but for the GPU: its cells, its checks, its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import warploom
from benchmarks import attention_backward as backward
from benchmarks import machine
from benchmarks.attention_backward_peers import error_share, ours, passes
from benchmarks.attention_peers import Problem, operands
from benchmarks.protocol import Cell, Entry, read
from warploom.generator.specification import parse_name
from warploom.runtime.measure import Call, Sampler

SMALL = Problem("small", 2, 4, 2, 65, 64, causal=True)
SQUARE = Problem("square", 2, 3, 3, 33, 64, causal=True)
WINDOW = Problem("window", 1, 4, 2, 65, 64, causal=True, window=15)
PACKED = Problem("packed", 3, 4, 2, 40, 64, causal=True, lengths=(40, 7, 30))
PEERS = ("cuDNN", "FlashAttention-2", "FlashAttention-3", "FlashAttention-4")
ALL = pytest.mark.parametrize("problem", [SMALL, WINDOW, PACKED], ids=lambda p: p.name)


def constant(seconds: float) -> Callable[[Sequence[Call]], Sampler]:
    """A sampler that makes every call once and takes `seconds`."""

    def sampler(calls: Sequence[Call]) -> Sampler:
        for call in calls:
            call()
        return lambda: seconds

    return sampler


def test_both_passes_are_measured_where_the_host_can_show() -> None:
    problems = backward.steps()
    assert {problem.seq for problem in problems} == {512, 1024, 2048}
    assert len(problems) == 18 + 3
    assert [(problem.batch, problem.heads) for problem in problems[-3:]] == [(1, 16)] * 3
    assert len({problem.name for problem in problems}) == len(problems)


@ALL
def test_warploom_is_checked_and_a_peer_that_is_missing_is_absent(problem: Problem) -> None:
    found = backward.compare(problem, (), "cpu", constant(1e-5))
    first, *beside = found.entries
    assert (first.contender, first.absent) == ("warploom", None)
    assert first.error_share is not None
    assert 0 < first.error_share <= 1
    assert str(first.kernel).startswith("attention_backward_sm90a_bf16_dim64_")
    assert sorted(entry.contender for entry in beside) == sorted(PEERS)
    for entry in beside:
        assert entry.absent or (entry.error_share or 0) <= 1
    assert found.problem["flops"] == problem.flops * 5 // 2
    assert found.floor is not None
    assert found.floor.seconds == pytest.approx(problem.floor.seconds * 2.5)


def test_deterministic_kernels_compete_with_peers_that_are_and_with_our_own() -> None:
    found = backward.compare(SMALL, (), "cpu", constant(1e-5), deterministic=True)
    assert [entry.contender for entry in found.entries][-1] == "warploom, in any order"
    first, last = found.entries[0], found.entries[-1]
    assert "_deterministic_" in str(first.kernel)
    assert "_deterministic_" not in str(last.kernel)
    absent = {entry.contender: entry.absent for entry in found.entries}
    assert absent["cuDNN"] == "torch has no deterministic one"


def test_both_passes_of_warploom_and_of_torch_are_checked() -> None:
    found = backward.compare_steps(SQUARE, "cpu", constant(1e-5))
    first, *beside = found.entries
    assert (first.contender, first.absent) == ("warploom", None)
    assert 0 < (first.error_share or 0) <= 1
    assert sorted(entry.contender for entry in beside) == sorted(PEERS)
    assert found.problem["flops"] == SQUARE.flops * 7 // 2


def test_a_spec_competes_where_it_computes_the_cell() -> None:
    one = operands(SMALL, "cpu")
    plan = warploom.plan_attention(one.q, one.k, one.v, causal=True)
    name = warploom.explain(plan).backward
    assert name is not None
    spec = parse_name(name)

    def names(problem: Problem, **options: Any) -> list[str]:
        cell = backward.compare(problem, [spec], "cpu", constant(1e-5), **options)
        return [entry.contender for entry in cell.entries]

    assert names(SMALL)[-1] == name
    assert name not in names(WINDOW)
    assert name not in names(SMALL, deterministic=True)


@ALL
def test_a_wrong_gradient_or_one_that_nothing_wrote_is_wrong(problem: Problem) -> None:
    (one,) = passes(problem, [operands(problem, "cpu")])
    assert error_share(one, one.into) == float("inf")
    for call in ours([one]).calls:
        call()
    assert error_share(one, one.into) <= 1
    for gradient in one.into:
        checked = gradient[:40] if problem.lengths else gradient[-1].transpose(0, 1)
        before = checked[-1].clone()
        checked[-1] += 0.25
        assert error_share(one, one.into) > 1
        checked[-1] = before
    assert error_share(one, one.into) <= 1


def test_the_forward_pass_is_run_once_and_before_anything_is_timed() -> None:
    given = passes(SMALL, [operands(SMALL, "cpu")])
    contender = ours(given)
    (call,) = contender.calls
    call()
    plans = warploom.counters.plans
    for gradient in given[0].into:
        gradient.fill_(torch.nan)
    call()
    assert warploom.counters.plans == plans
    assert error_share(given[0], given[0].into) <= 1


def cell(ours_seconds: float, peer_seconds: float | None, share: float = 0.5) -> Cell:
    entries = (
        Entry("warploom", ours_seconds, 0.01, error_share=share),
        Entry("cuDNN", peer_seconds, 0.01, absent=None if peer_seconds else "no such thing"),
    )
    about = {**asdict(SMALL), "type": "bf16", "flops": SMALL.flops}
    return Cell("d64 causal 65", about, entries, SMALL.floor)


@pytest.mark.parametrize(
    ("options", "name", "match"),
    [
        ([], "attention_backward", "d64 causal 512"),
        (["--deterministic"], "attention_backward_deterministic", "d64 causal 512"),
        (["--window"], "attention_backward_window", "window 1024 8192"),
        (["--packed", "--deterministic"], "attention_backward_packed_deterministic", "packed"),
        (["--autograd"], "attention_autograd", "d64 causal 512"),
    ],
    ids=str,
)
def test_a_wrong_result_ends_in_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], name: str, match: str
) -> None:
    monkeypatch.setattr(machine, "warm", lambda: None)
    monkeypatch.setattr(machine, "state", dict)
    for share, code in ((0.5, 0), (2.0, 3)):
        for function in ("compare", "compare_steps"):
            monkeypatch.setattr(backward, function, lambda *_, s=share, **__: cell(1.0, 2.0, s))
        path = tmp_path / "out.json"
        result = CliRunner().invoke(
            backward.main, [*options, "--match", match, "--json", str(path)]
        )
        assert result.exit_code == code, result.output
        assert read(path)["benchmark"] == name
        assert len(read(path)["cells"]) == 1

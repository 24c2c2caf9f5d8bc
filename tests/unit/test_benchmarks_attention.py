"""The attention benchmark but for the GPU: its cells, its count of work, its checks, its table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from samplers import constant

import warploom
from benchmarks import attention, machine, tables
from benchmarks.attention_peers import Problem, error_share, operands, ours
from benchmarks.protocol import Cell, Entry, read
from warploom.generator.specification import parse_name
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families.attention_forward import reference

SMALL = Problem("small", 2, 4, 2, 65, 64, causal=True)
WINDOW = Problem("window", 1, 4, 2, 65, 64, causal=True, window=15)
PACKED = Problem("packed", 3, 4, 2, 40, 64, causal=True, lengths=(40, 7, 30))
PEERS = ("cuDNN", "FlashAttention-2", "FlashAttention-3", "FlashAttention-4")


def test_the_cells_are_those_of_the_list() -> None:
    squares, grouped = attention.cells("square"), attention.cells("grouped")
    assert (len(squares), len(grouped), len(attention.cells())) == (30, 5, 35)
    assert {problem.batch * problem.seq for problem in squares} == {16_384}
    assert {problem.heads * problem.dim for problem in squares} == {2048}
    assert len({problem.name for problem in attention.cells()}) == 35
    assert [(p.batch, p.heads, p.kv_heads, p.seq) for p in grouped][-1] == (4, 32, 8, 2048)
    assert [problem.window for problem in attention.windows()] == [1023, None] * 3


@pytest.mark.parametrize("problem", [SMALL, WINDOW, Problem("full", 3, 2, 1, 65, 32)], ids=str)
def test_flops_are_those_of_the_scores_that_are_shown(problem: Problem) -> None:
    band = Band()
    if problem.causal:
        band = Band(right=0)
    if problem.window is not None:
        band = Band(left=problem.window, right=0)
    heads = problem.batch * problem.heads * problem.dim
    exact = heads * reference.flops(problem.seq, problem.seq, band)
    diagonal = 2 * heads * problem.seq if problem.causal and problem.window is None else 0
    assert problem.flops == exact - diagonal  # half a square leaves out half the diagonal


def test_packed_lengths_follow_a_law_and_fill_their_total() -> None:
    lengths = attention.zipf(32_768, random.Random(0))
    assert sum(lengths) == 32_768
    assert max(lengths) <= 8192
    assert sorted(lengths)[len(lengths) // 2] < 500 < max(lengths)
    (problem,) = attention.packed()
    assert problem.lengths == tuple(lengths)
    assert problem.flops == 2 * 64 * 128 * sum(n * n for n in lengths)


@pytest.mark.parametrize("problem", [SMALL, WINDOW, PACKED], ids=lambda p: p.name)
def test_warploom_is_checked_and_a_peer_that_is_missing_is_absent(problem: Problem) -> None:
    found = attention.compare(problem, (), "cpu", constant(1e-5))
    first, *beside = found.entries
    assert (first.contender, first.absent) == ("warploom", None)
    assert first.error_share is not None
    assert 0 < first.error_share <= 1
    assert str(first.kernel).startswith("attention_forward_sm90a_bf16_dim64_")
    assert sorted(entry.contender for entry in beside) == sorted(PEERS)
    for entry in beside:
        assert entry.absent or (entry.error_share or 0) <= 1
    assert "not installed" in str({e.contender: e.absent for e in beside}["FlashAttention-3"])


def test_a_spec_competes_where_it_computes_the_cell() -> None:
    one = operands(SMALL, "cpu")
    name = warploom.explain(warploom.plan_attention(one.q, one.k, one.v, causal=True)).kernel
    spec = parse_name(name)
    assert attention.compare(SMALL, [spec], "cpu", constant(1e-5)).entries[-1].contender == name
    names = [e.contender for e in attention.compare(WINDOW, [spec], "cpu", constant(1e-5)).entries]
    assert name not in names


def test_the_fastest_peer_that_is_right_stands_beside_ours() -> None:
    entries = [
        Entry("cuDNN", 3e-5, error_share=0.5),
        Entry("FlashAttention-2", 1e-5, error_share=7.0),
        Entry("FlashAttention-3", 2e-5, error_share=0.5),
        Entry("FlashAttention-4", absent="not installed"),
    ]
    ranked = [entry.contender for entry in sorted(entries, key=attention._rank)]
    assert ranked[:2] == ["FlashAttention-3", "cuDNN"]


@pytest.mark.parametrize("problem", [SMALL, WINDOW, PACKED], ids=lambda p: p.name)
def test_a_wrong_row_or_an_output_that_nothing_wrote_is_wrong(problem: Problem) -> None:
    one = operands(problem, "cpu")
    assert error_share(problem, one, one.out) == float("inf")
    for call in ours(problem, [one]).calls:
        call()
    assert error_share(problem, one, one.out) <= 1
    last = one.out[:40] if problem.lengths else one.out[-1].transpose(0, 1)
    last[-1] += 0.25
    assert error_share(problem, one, one.out) > 1


def cell(ours_seconds: float, peer_seconds: float | None, share: float = 0.5) -> Cell:
    entries = (
        Entry("warploom", ours_seconds, 0.01, error_share=share),
        Entry("cuDNN", peer_seconds, 0.01, absent=None if peer_seconds else "no such thing"),
    )
    about = {**asdict(SMALL), "type": "bf16", "flops": SMALL.flops}
    return Cell("d64 causal 65", about, entries, SMALL.floor)


def test_the_conclusion_counts_cells_and_takes_the_geometric_mean() -> None:
    text = attention.conclusion([cell(1.0, 4.0), cell(1.0, 1.0), cell(1.0, None)])
    assert "3 cells, 1 won, 1 tied, 0 lost, 1 absent, 0 wrong" in text
    assert "geometric mean 2.000, least 1.000" in text


def test_a_wrong_result_ends_in_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "warm", lambda: None)
    monkeypatch.setattr(machine, "state", dict)
    for share, code in ((0.5, 0), (2.0, 3)):
        monkeypatch.setattr(attention, "compare", lambda *_, s=share: cell(1.0, 2.0, s))
        path = tmp_path / "out.json"
        arguments = ["--match", "d64 causal 512", "--json", str(path)]
        result = CliRunner().invoke(attention.main, arguments)
        assert result.exit_code == code, result.output
        assert read(path)["benchmark"] == "attention_forward"
        assert len(read(path)["cells"]) == 1


def test_a_table_sums_up_each_kind_of_cell_and_all_of_them() -> None:
    cells = [cell(1e-6, 2e-6), cell(1e-6, None)]
    alone = summed(cells)
    figures = "| 2.000 | 2.000 | 2.000 | 2 | 1 | 0 | 0 | 1 | 0 |"
    assert alone[-1] == f"| head dimension 64, grouped queries {figures}"
    slower = cell(1e-6, 0.5e-6)
    changed = {"heads": 8, "kv_heads": 8, "dim": 128}
    cells.append(replace(slower, problem={**slower.problem, **changed}))
    other = "| head dimension 128 | 0.500 | 0.500 | 0.500 | 1 | 0 | 0 | 1 | 0 | 0 |"
    every = "| all | 1.000 | 0.500 | 2.000 | 3 | 1 | 0 | 1 | 1 | 0 |"
    assert summed(cells)[-3:] == [other, alone[-1], every]


def summed(cells: Sequence[Cell]) -> list[str]:
    listed = [one.as_json() for one in cells]
    totals, _, _ = tables.of_section("attention_forward", listed).partition("\n\n")
    return totals.splitlines()


def test_a_table_has_no_ratio_where_no_peer_has() -> None:
    row = "| head dimension 64, grouped queries | - | - | - | 1 | 0 | 0 | 0 | 1 | 0 |"
    assert summed([cell(1e-6, None)])[-1] == row


def test_operands_lie_as_a_model_has_them() -> None:
    one = operands(SMALL, "cpu")
    assert one.q.shape == (2, 4, 65, 64)
    assert one.q.transpose(1, 2).is_contiguous()
    assert one.out.isnan().all()
    assert operands(PACKED, "cpu").lengths["cu_seqlens_q"].tolist() == [0, 40, 47, 77]
    assert operands(PACKED, "cpu").q.dtype == torch.bfloat16

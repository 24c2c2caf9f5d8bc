"""`warploom bench`: missing and wrong peers, unsteady clocks, exit codes, documents."""

# ruff: noqa: ANN401 (peers are made up)

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

import warploom.generator
from benchmarks import attention, bench, gemm_peers, pictures
from benchmarks.protocol import Cell, Contender, Entry, Floor, read
from warploom.cli import bench as command
from warploom.cli import main
from warploom.errors import ConfigurationError
from warploom.runtime.measure import Call, Sampler

SHAPE = (64, 64, 128)


def taking(*seconds: float) -> Callable[[Sequence[Call]], Sampler]:
    """A sampler that runs the calls and says that each contender takes so long, in turn."""
    given = itertools.cycle(seconds)

    def sampler(calls: Sequence[Call]) -> Sampler:
        for call in calls:
            call()
        own = next(given)
        return lambda: own

    return sampler


def product(*peers: str, seconds: tuple[float, ...] = (1e-3, 2e-3), kind: str = "bf16") -> Cell:
    with torch.no_grad():
        return bench.gemm_cell(kind, SHAPE, peers, "cpu", taking(*seconds))


def test_a_cell_has_its_floor_its_ratio_and_what_decided() -> None:
    cell = product("cublas")
    assert (cell.ratio, cell.verdict) == (2.0, "won")
    assert cell.floor and cell.floor.limit == "bytes"
    assert cell.problem["decision"].startswith("least waves * cost")
    told = ["warploom", "torch.mm"]
    line = dict(zip(bench.columns(told), bench.row(cell, told), strict=True))
    assert (line["warploom"], line["torch.mm"], line["peer / warploom"]) == (1000.0, 2000.0, 2.0)


def test_peers_that_are_not_installed_are_rows_marked_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("triton", "quack", "quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    cell = product("cublas", "triton", "quack")
    assert [entry.contender for entry in cell.entries] == [
        "warploom",
        "torch.mm",
        "triton",
        "quack",
    ]
    assert [bool(entry.absent) for entry in cell.entries] == [False, False, True, True]
    assert bench.missing([cell]).keys() == {"triton", "quack"}
    assert bench.exit_code([cell], allow_missing=False) == 4
    assert bench.exit_code([cell], allow_missing=True) == 0
    assert bench.row(cell, ["triton"])[3] == "absent"


def test_a_peer_of_another_type_is_absent_with_the_reason() -> None:
    cell = product("quack", kind="int8")
    assert "not for int8" in (cell.entries[1].absent or "")
    assert bench.verdict(cell) == "absent" and cell.ratio is None


def test_a_peer_that_answers_wrongly_is_marked_and_not_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = gemm_peers.cublas

    def wrong(kind: Any, sets: Any) -> Contender:
        return Contender("fast and wrong", [lambda: None], lambda: 7.0)

    monkeypatch.setitem(bench.GEMM_PEERS, "triton", wrong)
    monkeypatch.setitem(bench.GEMM_PEERS, "cublas", plain)
    cell = product("triton", "cublas", seconds=(1e-3, 1e-4, 2e-3))
    assert [entry.contender for entry in cell.entries] == ["warploom", "torch.mm", "fast and wrong"]
    assert cell.ratio == 2.0
    assert bench.missing([cell])["fast and wrong"].endswith("wrong: 7 times its bound")
    assert bench.exit_code([cell], allow_missing=False) == 4
    assert bench.row(cell, ["fast and wrong"])[3] == "wrong"
    alone = product("triton", seconds=(1e-3, 1e-4))
    assert bench.verdict(alone) == "absent"
    assert bench.conclusion([alone, cell])["geometric_mean"] == pytest.approx(2.0)


def test_a_wrong_result_of_ours_is_exit_code_3() -> None:
    cell = product("cublas")
    broken = replace(cell, entries=(replace(cell.entries[0], error_share=2.0), *cell.entries[1:]))
    assert bench.verdict(broken) == "wrong"
    assert bench.exit_code([broken], allow_missing=True) == 3


def cell_with(spread: float, ratio: float = 1.1, **problem: Any) -> Cell:
    entries = (
        Entry("warploom", 1e-5, spread, error_share=0.5),
        Entry("torch.mm", ratio * 1e-5, 0.001, error_share=0.5),
    )
    about = {"type": "bf16", "m": 1, "n": 4096, "k": 4096, **problem}
    return Cell(f"{about}", about, entries, Floor(5e-6, "bytes"))


def test_unsteady_cells_are_measured_again_and_then_marked() -> None:
    def measured(spreads: list[float]) -> tuple[Cell, int]:
        left = iter(spreads)
        cell = bench.steadied(lambda: cell_with(next(left)))
        return cell, len(spreads) - len(list(left))

    for spreads, noisy, times in (
        ([0.01], None, 1),
        ([0.2, 0.01], None, 2),
        ([0.2, 0.2], True, 2),
    ):
        cell, taken = measured(spreads)
        assert (cell.problem.get("noisy"), taken) == (noisy, times)
    assert bench.row(cell, [])[-1] == "noisy"


def test_attention_is_measured_beside_the_peers_that_are_there() -> None:
    one = replace(attention.cells("square")[0], batch=1, heads=2, kv_heads=2, seq=128)
    with torch.no_grad():
        cell = bench.attention_cell(one, ("fa2", "triton", "fa4"), "cpu", taking(1e-3, 3e-3))
    names = [entry.contender for entry in cell.entries]
    assert names[0] == "warploom" and sorted(names[1:]) == sorted(
        ["FlashAttention-2", "Triton", "FlashAttention-4"]
    )
    assert "first of its class" in cell.problem["decision"]
    assert bench.missing([cell])["FlashAttention-4"]


def test_gradients_are_measured_beside_the_peers_that_have_them() -> None:
    one = replace(attention.cells("square")[0], batch=1, heads=2, kv_heads=2, seq=128)
    with torch.no_grad():  # as the command measures
        cell = bench.attention_backward_cell(
            one, ("fa2", "fa4", "triton"), "cpu", taking(1e-3, 3e-3)
        )
    names = [entry.contender for entry in cell.entries]
    assert names[0] == "warploom" and sorted(names[1:]) == ["FlashAttention-2", "FlashAttention-4"]
    assert str(cell.entries[0].kernel).startswith("attention_backward_sm90a")
    assert "first of its class" in cell.problem["decision"]
    assert cell.name.endswith(" backward") and cell.problem["pass"] == "backward"
    assert cell.problem["flops"] == one.flops * 5 // 2
    assert cell.entries[0].error_share and cell.entries[0].error_share < 1


def test_attention_has_both_passes_of_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention_cell", "attention_backward_cell"):
        monkeypatch.setattr(bench, name, lambda one, *_, made=name: cell_with(0.0, made=made))

    def made(**asked: Any) -> list[str]:
        found = bench.measured("attention", bench.Asked("all", (), **asked))
        return [cell.problem["made"] for cell in found]

    assert made() == 35 * ["attention_cell"] + 35 * ["attention_backward_cell"]
    assert made(passes=("backward",), m=(512,)) == 6 * ["attention_backward_cell"]
    assert made(match="d256 causal 16384 backward") == ["attention_backward_cell"]
    with (attention.ROOT / "benchmarks" / "cells.yaml").open() as file:
        assert tuple(yaml.safe_load(file)["attention"]["passes"]) == bench.PASSES


def test_both_passes_have_pictures_and_means_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = []
    for name, ratio in (("forward", 1.1), ("backward", 0.9)):
        for one in attention.cells("square"):
            about = {**asdict(one), "type": "bf16", "pass": name, "flops": one.flops}
            cells.append(replace(cell_with(0.01, ratio), name=one.name, problem=about))
    drawn = pictures.draw("bench_attention", document(cells), tmp_path)
    assert [path.name for path in drawn] == [
        "bench_attention_bf16_forward_rates.svg",
        "bench_attention_bf16_backward_rates.svg",
        "bench_attention_sorted.svg",
    ]
    means = {name: found["geometric_mean"] for name, found in bench.conclusions(cells).items()}
    assert means == {
        "bf16 forward": pytest.approx(1.1),
        "bf16 backward": pytest.approx(0.9),
    }


def document(cells: Sequence[Cell]) -> dict[str, Any]:
    product = "m" in cells[0].problem
    return {
        "benchmark": "bench_gemm" if product else "bench_attention",
        "machine": {"gpu": "NVIDIA H200", "torch": "2.11", "date": "2026-11-21"},
        "states": [],
        "cells": [cell.as_json() for cell in cells],
    }


def test_cells_are_those_that_were_asked_for() -> None:
    assert len(bench.shapes(bench.Asked("all", ()))) == 5 + 180
    assert len(bench.shapes(bench.Asked("tuned", ()))) == 90
    assert {m for m, _, _ in bench.shapes(bench.Asked("tuned", (), m=(1, 16)))} == {1, 16}
    asked = bench.Asked("tuned", ("cublas",), ("bf16",), match="64x2112x7168")
    assert [m for m, _, _ in bench.shapes(asked)].count(64) == 10


# ---- The command ---------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("gemm", "--peers", "cudnn"), "there are cublas, triton, quack"),
        (("attention", "--peers", "cublas"), "there are cudnn, fa2, fa3, fa4, triton"),
        (("gemm", "--cells", "grouped"), "there are squares, llm, tuned, all"),
        (("gemm", "--types", "fp4"), "bf16, e4m3"),
        (("gemm", "--m", "x"), "numbers, separated by commas"),
        (("convolution",), "Invalid value"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: tuple[str, ...], told: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1 and told in done.stderr


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("gemm")
    assert done.exit_code == 1 and "no GPU" in done.stderr


def test_without_a_checkout_it_says_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "site-packages" / "warploom" / "generator" / "__init__.py"
    monkeypatch.setattr(warploom.generator, "__file__", str(elsewhere))
    with pytest.raises(ConfigurationError, match="in the repository, not in the wheel"):
        command.benchmarks()


def test_a_run_prints_records_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import machine

    listed = [(m, n, 128) for m in (32, 64, 128) for n in (64, 128)]
    monkeypatch.setattr(machine, "require_gpu", lambda: None)
    for name in ("warm", "state"):
        monkeypatch.setattr(machine, name, dict)
    monkeypatch.setattr(bench, "shapes", lambda asked: listed)
    measured = partial(bench.measured, device="cpu", sampler=taking(1e-3, 2e-3))
    monkeypatch.setattr(bench, "measured", measured)
    result, plot = tmp_path / "result.json", tmp_path / "pictures"
    options = ("--types", "bf16", "--peers", "cublas", "--json", str(result), "--plot", str(plot))
    done = run("gemm", *options)
    assert done.exit_code == 0, done.output
    assert "geometric_mean  2" in done.stdout and done.stdout.count("won") >= 6
    names = {path.name for path in plot.glob("*.svg")}
    assert names == {"bench_gemm_bf16_layers.svg", "bench_gemm_sorted.svg"}
    found = read(result)
    assert found["benchmark"] == "bench_gemm" and len(found["cells"]) == 6

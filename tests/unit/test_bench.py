"""`warploom bench`: what is measured, missing and wrong peers, unsteady clocks, documents."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import warploom.generator
from benchmarks import machine, profiles, runner, tables, wording
from benchmarks.families import Asked, Case, families
from benchmarks.peers import gemm
from benchmarks.protocol import read
from warploom.cli import bench as command
from warploom.cli import main
from warploom.errors import ConfigurationError
from warploom.generator import families as kernels
from warploom.runtime.contest import Cell, Contender, Entry, Floor
from warploom.runtime.measure import Call, Sampler

ROOT = Path(__file__).parents[2]


def taking(*seconds: float) -> Callable[[Sequence[Call]], Sampler]:
    """A sampler that runs the calls and says that each contender takes so long, in turn."""
    given = itertools.cycle(seconds)

    def sampler(calls: Sequence[Call]) -> Sampler:
        for call in calls:
            call()
        own = next(given)
        return lambda: own

    return sampler


def measured(*contenders: Contender, seconds: tuple[float, ...] = (1e-3, 2e-3)) -> Cell:
    case = Case("made up", {"m": 1}, Floor(1e-4, "bytes"), lambda _asked: contenders)
    return runner.measure(case, Asked(), taking(*seconds))


def answering(name: str, share: float = 0.5, *, peer: bool = True) -> Contender:
    return Contender(name, [lambda: None], lambda: share, peer=peer)


def refusing(name: str) -> Contender:
    def call() -> None:
        raise RuntimeError(f"{name} is not installed\nand more lines")

    return Contender(name, [call], peer=True)


OURS = Contender("warploom", [lambda: None], lambda: 0.5, lambda: ("a kernel", "a record"))


# ---- Cells and families --------------------------------------------------------------------------


def listed(*names: str, **asked: Any) -> list[Case]:
    return list(runner.cases(runner.named(names), Asked(**asked)))


def test_every_family_of_kernels_is_measured() -> None:
    assert sorted(families()) == sorted(kernels.names())
    assert [one.name for one in runner.named(["attention"])] == [
        "attention_forward",
        "attention_backward",
    ]


def test_the_cells_are_those_of_the_list() -> None:
    assert len(listed("gemm")) == len(listed("gemm", cells=("all",))) == 4 * (5 + 180)
    assert len(listed("attention")) == 2 * 35
    assert len(listed("gemm", cells=("tuned",), types=("bf16",))) == 90
    squares = listed("attention_forward", cells=("square",))
    assert {case.problem["batch"] * case.problem["seq"] for case in squares} == {16_384}
    assert {case.problem["heads"] * case.problem["dim"] for case in squares} == {2048}


OWN = Entry("warploom", 1e-5, 0.01, "a kernel", 0.5)


def test_cases_of_every_set_are_shown_and_can_be_asked_for_by_rows() -> None:
    """Guards against a set whose problems do not say what tables and `--m` ask of them."""
    for name, family in families().items():
        for word, group in family.groups.items():
            if not group.cases or word == "compile":  # whose kernels have no rows
                continue
            cases = listed(name, cells=(word,))
            assert len({case.name for case in cases}) == len(cases) > 0
            made = (Cell(case.name, case.problem, (OWN,), case.floor) for case in cases)
            document = {"cells": [cell.as_json() for cell in made]}
            for own in wording.sections(document).values():
                assert tables.of_section(own).count("\n") > len(own)
                assert group.listed or all(family.subject(one["problem"]) for one in own)
            assert word == "host" or all(case.floor for case in cases)
            assert isinstance(listed(name, cells=(word,), m=(16,)), list)


@pytest.mark.parametrize(
    ("names", "asked", "count"),
    [
        (("gemm",), {"cells": ("llm",), "m": (17,)}, 40),  # a number that no list has
        (("gemm",), {"cells": ("tuned",), "types": ("bf16",), "match": " 64x2112x7168"}, 1),
        (("gemm",), {"cells": ("squares", "training")}, 20 + 7),
        (("attention_backward",), {"m": (512,)}, 6),
        (("attention",), {"match": "d256 causal 16384 backward"}, 1),
        (("attention",), {"cells": ("window",)}, 2 * 6),
        (("attention",), {"cells": ("packed",)}, 2),
        (("attention",), {"cells": ("deterministic",)}, 35),
        (("attention",), {"cells": ("packed_deterministic",)}, 1),
        (("attention_backward",), {"cells": ("autograd",)}, 18 + 3),
        (("gemm",), {"cells": ("operations",)}, 5 + 12 + 5 + 1),
        (("mixed_gemm",), {"cells": ("experts",), "m": (16,), "match": "mxfp4 GPT-OSS"}, 3),
        (("gemm",), {"cells": ("drawn",), "count": 7, "types": ("bf16", "int8")}, 14),
    ],
)
def test_cells_are_those_that_were_asked_for(
    names: tuple[str, ...], asked: dict[str, Any], count: int
) -> None:
    assert len(listed(*names, **asked)) == count


# ---- Contenders ----------------------------------------------------------------------------------


def test_a_cell_has_its_ratio_its_kernel_and_what_decided() -> None:
    cell = measured(OURS, answering("peer"))
    assert (cell.ratio, cell.verdict) == (2.0, "won")
    assert cell.entries[0].kernel == "a kernel"
    assert cell.problem["decision"] == "a record"


def test_the_fastest_right_peer_stands_beside_ours_and_our_own_variants_last() -> None:
    slow, fast, wrong = answering("slow"), answering("fast"), answering("wrong", 7.0)
    spec = answering("a spec", peer=False)
    seconds = (1e-3, 4e-3, 2e-3, 1e-4, 9e-4)
    cell = measured(OURS, slow, fast, wrong, spec, seconds=seconds)
    names = [entry.contender for entry in cell.entries]
    assert names == ["warploom", "fast", "slow", "wrong", "a spec"]
    assert cell.ratio == 2.0
    assert runner.missing([cell])["wrong"].endswith("wrong: 7 times its bound")


def test_peers_that_are_missing_are_absent_with_the_reason() -> None:
    cell = measured(OURS, refusing("peer"))
    assert cell.entries[1].absent == "peer is not installed"
    assert (cell.ratio, cell.verdict) == (None, "absent")
    assert runner.exit_code([cell], allow_missing=False) == 4
    assert runner.exit_code([cell], allow_missing=True) == 0


def test_a_peer_that_is_wrong_is_no_ratio_and_one_of_ours_exit_code_3() -> None:
    cell = measured(OURS, answering("peer", 7.0), seconds=(1e-3, 1e-4))
    assert (cell.ratio, cell.verdict) == (None, "absent")
    broken = measured(replace(OURS, error_share=lambda: 2.0), answering("peer"))
    assert broken.verdict == "wrong"
    assert runner.exit_code([broken], allow_missing=True) == 3
    assert runner.exit_code([measured(refusing("warploom"))], allow_missing=True) == 4


def test_unsteady_cells_are_measured_again_and_then_marked() -> None:
    def steadied(spreads: list[float]) -> tuple[Cell, int]:
        def entries(spread: float) -> tuple[Entry, ...]:
            return Entry("warploom", 1e-5, spread), Entry("peer", 1e-5, 0.001)

        left = iter(spreads)
        cell = runner.steadied(lambda: Cell("cell", {}, entries(next(left))))
        return cell, len(spreads) - len(list(left))

    for spreads, noisy, times in (
        ([0.01], None, 1),
        ([0.2, 0.01], None, 2),
        ([0.2, 0.2], True, 2),
    ):
        cell, taken = steadied(spreads)
        assert (cell.problem.get("noisy"), taken) == (noisy, times)


# ---- The command ---------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("gemm", "--peers", "cudnn"), "there are cublas, triton, quack"),
        (("attention", "--peers", "cublas"), "there are cudnn, fa2, fa3, fa4, triton"),
        (("gemm", "--cells", "llm,strassen", "--peers", "quack"), "--cells strassen, of gemm"),
        (("mixed_gemm", "--cells", "gated", "--peers", "humming"), "contenders of their own"),
        (("gemm", "--cells", "groups"), "there are llm, squares, tuned, drawn, training"),
        (("gemm", "--types", "fp4"), "bf16, fp16"),
        (("gemm", "--m", "x"), "numbers, separated by commas"),
        (("gemm", "--m", "9" * 5000), "numbers, separated by commas"),
        (("gemm", "--problems", "1:" + "9" * 5000), "at most 9 digits"),
        (("gemm", "--problems", "1:0"), "must be SEED or SEED:COUNT"),
        (("gemm", "--match", "no such cell"), "leave none"),
        (("convolution",), "there are gemm, mixed_gemm, attention_forward"),
        (("gemm", "--gpus", "2"), "--gpus 2 without --ray"),
        (("gemm", "--shapes", "1x8x8", "--profile"), "--profile"),
        (("gemm", "--kind", "NVIDIA H200"), "--kind NVIDIA H200 without --ray"),
        (("gemm", "--problems", "1:1", "--autotune", "--ray"), "--autotune with --ray"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: tuple[str, ...], told: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1 and told in done.stderr


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("gemm")
    assert done.exit_code == 1 and "no GPU" in done.stderr


def test_a_cluster_that_cannot_be_reached_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not connect\nand many lines more")

    monkeypatch.setitem(sys.modules, "ray", None)
    done = run("gemm", "--cells", "squares", "--ray")
    assert done.exit_code == 1 and "pip install 'warploom[fleet]'" in done.stderr
    lost = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", lost)
    done = run("gemm", "--cells", "squares", "--ray")
    assert done.exit_code == 1 and "--ray auto: Could not connect" in done.stderr


def test_without_a_checkout_it_says_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "site-packages" / "warploom" / "generator" / "__init__.py"
    monkeypatch.setattr(warploom.generator, "__file__", str(elsewhere))
    with pytest.raises(ConfigurationError, match="in the repository, not in the wheel"):
        command.benchmarks()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run on the CPU, peers take twice as long, and there is no GPU to be warmed."""
    for name in ("warm", "state"):
        monkeypatch.setattr(machine, name, dict)
    plain = runner.measured

    def instead(found: Sequence[Case], asked: Asked) -> Iterator[Cell]:
        return plain(found, replace(asked, device="cpu"), taking(1e-3, 2e-3))

    monkeypatch.setattr(runner, "measured", instead)
    squares = [(m, n, 128) for m in (32, 64, 128) for n in (64, 128)]
    monkeypatch.setitem(gemm.LISTED, "squares", squares)


def test_a_run_prints_records_and_draws(on_cpu: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, plot = tmp_path / "result.json", tmp_path / "pictures"
    options = ("--types", "bf16", "--cells", "squares", "--peers", "cublas")
    done = run("gemm", *options, "--json", str(result), "--plot", str(plot))
    assert done.exit_code == 0, done.output
    assert "geometric_mean  2" in done.stdout and done.stdout.count("won") >= 6
    names = {path.name for path in plot.glob("*.svg")}
    assert names == {"bench_gemm_bf16_layers.svg", "bench_gemm_sorted.svg"}
    found = read(result)
    assert found["benchmark"] == "bench_gemm" and len(found["cells"]) == 6
    about = found["cells"][0]["problem"]
    assert (about["family"], about["cells"], about["type"]) == ("gemm", "squares", "bf16")


def test_a_profile_says_where_the_time_of_a_call_goes(
    on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a profile of a peer, or of more than one call."""
    monkeypatch.setattr(profiles, "LONGEST", 10_000)  # which take most depends on the machine
    result = tmp_path / "result.json"
    options = ("--types", "bf16", "--cells", "squares", "--peers", "cublas", "--match", "32x64")
    done = run("gemm", *options, "--profile", "--json", str(result))
    assert done.exit_code == 0, done.output
    assert "all operators" in done.stdout and "all functions" in done.stdout
    (cell,) = read(result)["cells"]
    rows = cell["problem"]["profile"]
    assert {row["where"] for row in rows} == {"torch", "host"}
    (gemm_of_the_api,) = (row for row in rows if re.fullmatch(r"api\.py:\d+ gemm", row["what"]))
    assert gemm_of_the_api["calls"] == 1


def test_a_kernel_of_a_configuration_competes_where_it_computes_the_cell(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from warploom.generator.space import expand_file

    file = tmp_path / "plain.yaml"
    operation, schedule = "{family: gemm, a: bf16, b: bf16, d: bf16}", "{tile: [128, 128, 64]}"
    file.write_text(
        f"version: 1\narch: sm_90a\nkernels: [{{operations: [{operation}], "
        f"schedules: [{schedule}]}}]\n"
    )
    monkeypatch.setattr(warploom, "warmup", lambda _path: 1)
    result = tmp_path / "result.json"
    options = ("--cells", "squares", "--peers", "cublas", "--match", "bf16 32x64", "--json")
    done = run("gemm", "--specs", str(file), *options, str(result))
    assert done.exit_code == 0, done.output
    (cell,) = read(result)["cells"]
    names = [entry["contender"] for entry in cell["entries"]]
    assert names == ["warploom", "torch.mm", expand_file(file).specs[0].name]


def test_drawn_problems_are_swept(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every kernel of a sweep is checked by itself: all of them write to one output."""
    from benchmarks.peers import _drawn

    monkeypatch.setattr(_drawn, "products", lambda *_: [(128, 128, 128)])
    monkeypatch.setattr(_drawn, "ours", lambda *_: OURS)
    file, result = tmp_path / "swept.yaml", tmp_path / "result.json"
    file.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]\n"
        "    schedules: [{tile: [128, 64, 64]}, {tile: [128, 128, 64]}]\n"
    )
    monkeypatch.setattr(warploom, "warmup", lambda _path: 1)
    options = ("--specs", str(file), "--types", "bf16", "--allow-missing", "--json", str(result))
    done = run("gemm", "--problems", "3:1", *options)
    assert done.exit_code == 0, done.output
    assert "percentile_5" in done.stdout
    (cell,) = read(result)["cells"]
    assert cell["problem"]["seed"] == 3
    swept = [one for one in cell["entries"] if one["kernel"] and one["contender"] == one["kernel"]]
    assert len(swept) == 2 and all(one["error_share"] <= 1 for one in swept)


def test_compile_times_need_no_gpu_and_stand_beside_a_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.peers import _compiled

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Of all that there are, those of a small family and of one type: each kernel is rendered.
    monkeypatch.setattr(_compiled, "smoke", lambda: [ROOT / "configs" / "cast" / "smoke.yaml"])
    monkeypatch.setattr(gemm, "TYPES", {"bf16": gemm.TYPES["bf16"]})
    seconds = {"draft": 1.0}
    monkeypatch.setattr(_compiled, "_seconds", lambda name, _source: seconds.get(name, 1.25))
    baseline, result = tmp_path / "draft.cu", tmp_path / "result.json"
    baseline.write_text("")
    # Of few rows, which these cells have not themselves.
    options = ("--baseline", str(baseline), "--match", "NVRTC", "--json", str(result))
    done = run("gemm", "--cells", "compile", "--m", "16", *options)
    assert done.exit_code == 0, done.output
    cells = read(result)["cells"]
    assert len(cells) == len({cell["problem"]["kernel"] for cell in cells}) > 1
    assert [entry["contender"] for entry in cells[0]["entries"]] == ["warploom", "draft.cu"]
    assert cells[0]["ratio"] == 0.8 and "draft.cu" in done.stdout

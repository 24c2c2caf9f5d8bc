"""README, docs/benchmarks.md and their pictures: drawn from results, and still what results say."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, readme, report, tables, wording
from benchmarks.families import families
from benchmarks.peers._attention import squares
from benchmarks.protocol import Record
from warploom.errors import ConfigurationError
from warploom.runtime.contest import Cell, Entry, Floor

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11", "date": "2026-11-21"}


def cell(ratio: float | None = 1.1, **problem: Any) -> Cell:
    """A product of Llama 3 8B's o."""
    about = {"family": "gemm", "cells": "llm", "type": "bf16"}
    about |= {"m": 1, "n": 4096, "k": 4096, **problem}
    peer = Entry("torch.mm", absent="No module named 'torch'")
    if ratio is not None:
        peer = Entry("torch.mm", ratio * 1e-5, 0.001, error_share=0.5)
    name = f"{about['type']} {about['m']}x{about['n']}x{about['k']}"
    entries = (Entry("warploom", 1e-5, 0.01, error_share=0.5), peer)
    return Cell(name, about, entries, Floor(5e-6, "bytes"))


def document(cells: list[Cell], benchmark: str = "bench_gemm") -> dict[str, Any]:
    listed = [one.as_json() for one in cells]
    return {"benchmark": benchmark, "machine": MACHINE, "states": [], "cells": listed}


GRID = document(
    [
        cell(0.9 + 0.03 * index, m=m, n=n)
        for index, (m, n) in enumerate(itertools.product((1, 16, 64), (4096, 6144)))
    ]
)


def write(folder: Path, benchmark: str, cells: list[Cell]) -> None:
    record = Record(folder / f"{benchmark}.json", benchmark, MACHINE, [{"driver": "580.1"}])
    for one in cells:
        record.add(one)


# ---- Pages ---------------------------------------------------------------------------------------


def test_the_readme_shows_results_and_kernel_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its program prints is held to it in test_guide.py, where torch is loaded once."""
    (shown,) = re.findall(r"^```text\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(readme, "printed", lambda text: shown)
    assert readme.renewed(README) == README, "python -m benchmarks.readme --write README.md"


def test_what_the_readme_prints_does_not_depend_on_who_renews_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WARPLOOM_RECORDS", "ignore")
    told = (
        "import os; print(os.environ.get('WARPLOOM_RECORDS'), 'WARPLOOM_RECORDS_DIR' in os.environ)"
    )
    assert readme.printed(f"```python\n{told}\n```\n") == "None True"


def test_the_readme_is_short_and_its_table_shorter() -> None:
    told = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", README, flags=re.DOTALL)
    told = re.sub(r"^```(text|cpp)\n.*?^```$", "", told, flags=re.DOTALL | re.MULTILINE)
    assert len(told.splitlines()) < 110 and len(told.split()) < 900, "what is not generated"
    measured = README.partition("measured: begin -->")[2].partition("<!--")[0]
    rows = [line for line in measured.splitlines() if line.startswith("|")]
    assert 4 < len(rows) - 2 <= 12


def test_the_page_of_benchmarks_is_that_of_the_results() -> None:
    assert report.renewed(PAGE) == PAGE, "python -m benchmarks.report --write docs/benchmarks.md"


def test_titles_of_the_page_are_unique_and_say_type_and_pass() -> None:
    titles = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    assert len(titles) == len(set(titles)) > 12
    measured = [title for title in titles if re.match("GEMM|Attention", title)]
    types = ("bf16", "e4m3", "int8")
    assert [title for title in measured if not any(word in title for word in types)] == []
    passes = ("forward", "backward")
    attention = [title for title in measured if title.startswith("Attention")]
    assert [title for title in attention if not any(word in title for word in passes)] == []


def test_every_result_has_a_title_of_its_own() -> None:
    for stem, one in report.documents().items():
        assert all(wording.sections(one)), stem


@pytest.mark.parametrize("text", [README, PAGE], ids=["README", "benchmarks"])
def test_every_picture_has_a_sentence_for_those_who_do_not_see_it(text: str) -> None:
    images = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    assert images
    assert [
        file
        for words, file in images
        if not 8 <= len(words.split()) <= 45 or Path(file).stem in words or not words.endswith(".")
    ] == []


def test_pictures_show_what_the_results_say() -> None:
    folder = ROOT / "docs" / "pictures"
    drawn = {f"{one.stem}.svg": one for one in report.pictures(report.documents())}
    assert {path.name for path in folder.glob("*")} == drawn.keys()
    stale = [name for name, one in drawn.items() if one.digest not in (folder / name).read_text()]
    assert stale == [], "python -m benchmarks.report --write docs/benchmarks.md"
    linked = re.findall(r"\(pictures/(.*?)\)", PAGE)
    assert set(linked) == drawn.keys()


def test_sentences_of_pictures_name_gpu_and_date() -> None:
    for one in report.pictures(report.documents()):
        assert "NVIDIA H200" in one.alt and re.search(r"\d{4}-\d\d-\d\d", one.alt), one.stem


# ---- Tables --------------------------------------------------------------------------------------


def test_cells_without_a_peer_name_the_other_ways_of_ours() -> None:
    """They said that they were "Compared with nothing", above figures of what they were beside."""
    ways = ("warploom", "warploom, then torch.compile")
    entries = [{"contender": name, "seconds": 1.0, "error_share": 0.5} for name in ways]
    told = wording.beside([{"entries": entries, "problem": {"family": "mixed_gemm"}}])
    assert told == "Warploom, then torch.compile"
    assert "Compared with nothing" not in PAGE


def test_a_peer_has_the_name_that_its_own_family_gives_it() -> None:
    """Tables of casts had a column "torch's sort, histc and cumsum", which is what routes have."""
    named = {name: wording.peer("torch", family) for name, family in families().items()}
    assert named["cast"] == "torch's operations" and named["gemm"] == "torch"
    assert named["route"] == "torch's sort, histc and cumsum"


def test_a_report_has_every_cell_by_size_and_says_what_decided(tmp_path: Path) -> None:
    reasons = {16: "nearest record, x", 1: "recorded 2026-11-21 at this shape, 1.2 times"}
    cells = [cell(1.1, m=m, decision=reason) for m, reason in reasons.items()]
    write(tmp_path, "bench_gemm", [*cells, cell(0.9, m=64, noisy=True), cell(None, m=100)])
    text = report.draw(tmp_path)
    assert "## GEMM, bf16, layers of language models\n\nNVIDIA H200, driver 580.1, torch" in text
    assert (
        "Drawn from `bench_gemm.json`.\nCompared with torch.mm (cuBLAS) in 3 of 4 cases.\n" in text
    )
    assert "Absent: torch.mm (cuBLAS) in 1 of 4 cases (not installed).\n" in text
    assert "Lost, with fastest baseline / Warploom:\n\n- Llama 3 8B o, M 64: 0.90\n" in text
    assert "| bf16 | 1.029 | 0.900 | 1.100 | 4 | 2 | 0 | 1 | 1 | 0 |" in text
    rows = [line for line in text.splitlines() if line.startswith("| bf16 1")]
    assert [row.split()[2] for row in rows] == ["1x4096x4096,", "16x4096x4096,", "100x4096x4096,"]
    assert rows[0].endswith(
        "| 5.0 (bytes) | 10.0 | 11.0 | 3 | 1.100 | won | recorded 2026-11-21 at this shape |"
    )
    assert rows[2].endswith("| 5.0 (bytes) | 10.0 | - | 336 | - | absent | - |")
    assert "lost, noisy" in text
    assert report.draw(tmp_path / "none") == report.NOTHING


@pytest.mark.parametrize(
    ("family", "group"), [(one.name, group) for one in families().values() for group in one.groups]
)
def test_every_set_of_cells_has_a_section(family: str, group: str, tmp_path: Path) -> None:
    about: dict[str, Any] = {"family": family, "cells": group}
    if family != "gemm":
        about |= {
            "type": "bf16",
            "lengths": [],
            "window": None,
            "causal": True,
            "operation": "sums",
        }
        about |= {"heads": 4, "kv_heads": 2, "dim": 64, "seq": 65, "batch": 1, "flops": 1e9}
        about |= {"rows": 1, "keys": 65, "bytes": 1 << 20}
    one = cell(**about)
    write(tmp_path, "bench", [one])
    text = report.draw(tmp_path)
    assert text.count("## ") == 1 and "| --- |" in text


def test_a_peer_that_answers_wrongly_is_named_so() -> None:
    one = cell()
    wrong = replace(one, entries=(*one.entries, Entry("triton", 1e-6, 0.0, error_share=7.0)))
    other = replace(one, entries=(*one.entries, Entry("triton", 2e-5, 0.0, error_share=0.5)))
    _, rows = tables.of_cells([wrong.as_json(), other.as_json()])
    assert [row[4] for row in rows] == ["wrong", "20.0"]


def test_a_peer_that_answers_wrongly_has_no_ratio(tmp_path: Path) -> None:
    one = cell()
    wrong = Entry("torch.mm", 1e-6, 0.0, error_share=7.0)
    write(tmp_path, "bench_gemm", [replace(one, entries=(one.entries[0], wrong)), one])
    text = report.draw(tmp_path)
    assert "| bf16 | 1.100 | 1.100 | 1.100 | 2 | 1 | 0 | 0 | 1 | 0 |" in text


def test_losses_are_named_by_layer_those_first_that_lose_most() -> None:
    cells = [cell(0.97, m=8), cell(0.9, m=64), cell(0.95, n=6144), cell(1.2, m=2), cell(0.99)]
    found = wording.losses(one.as_json() for one in cells)
    assert found == ["Llama 3 8B o, M 8, 64: 0.90 to 0.97", "Llama 3 8B qkv, M 1: 0.95"]
    assert wording.losses([one.as_json() for one in cells], 1)[1:] == ["1 more"]


def test_totals_sum_up_each_division_of_cells_and_all_of_them() -> None:
    def one(heads: int, dim: int, ratio: float | None) -> dict[str, Any]:
        about = {"family": "attention_forward", "cells": "square", "lengths": [], "window": None}
        about |= {"heads": heads, "kv_heads": 2, "dim": dim, "causal": True}
        return cell(ratio, **about, seq=65, batch=1, flops=1e9).as_json()

    def summed(*cells: dict[str, Any]) -> list[str]:
        return tables.of_section(cells).partition("\n\n")[0].splitlines()

    row = "| head dimension 64, grouped queries | - | - | - | 1 | 0 | 0 | 0 | 1 | 0 |"
    assert summed(one(4, 64, None))[-1] == row
    rows = summed(one(4, 64, 2.0), one(4, 64, None), one(2, 128, 0.5))
    assert rows[-3:] == [
        "| head dimension 128 | 0.500 | 0.500 | 0.500 | 1 | 0 | 0 | 1 | 0 | 0 |",
        "| head dimension 64, grouped queries | 2.000 | 2.000 | 2.000 | 2 | 1 | 0 | 0 | 1 | 0 |",
        "| all | 1.000 | 0.500 | 2.000 | 3 | 1 | 0 | 1 | 1 | 0 |",
    ]


# ---- Pictures ------------------------------------------------------------------------------------


def test_pictures_are_drawn_from_cells_and_are_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, again = tmp_path / "first", tmp_path / "again"
    paths = pictures.draw("bench_gemm", GRID, first)
    assert [path.name for path in paths] == ["bench_gemm_bf16_layers.svg", "bench_gemm_sorted.svg"]
    pictures.draw("bench_gemm", GRID, again)
    for path in paths:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert path.read_bytes() == (again / path.name).read_bytes()
    lost = document([cell(None, m=m, n=n) for m in (1, 16, 64) for n in (4096, 6144)])
    assert pictures.draw("nothing", lost, tmp_path / "none") == []


def test_a_picture_names_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heat, ratios = (path.read_text() for path in pictures.draw("bench_gemm", GRID, tmp_path))
    for told in ("GEMM, bf16", "H200", "above 1: Warploom is faster"):
        assert told in heat and told in ratios
    assert "Llama 3 8B qkv" in heat
    assert "6 cases: 1 won, 2 tied, 3 lost" in ratios


def test_cells_without_a_ratio_are_hatched_and_explained_below(tmp_path: Path) -> None:
    cells = [cell(1.5, m=m, n=n) for m in (32, 64, 128) for n in (4096, 6144)]
    write(tmp_path, "bench_gemm", [*cells, cell(None, m=1)])
    text = report.draw(tmp_path)
    told = "bench_gemm_bf16_layers.svg)\n\nHatched: 1 case not measured, 1 case without a baseline."
    assert told in text and "cases (not installed)" in text


def test_a_length_that_was_not_measured_is_named_below() -> None:
    about = {"family": "attention_backward", "cells": "autograd"}
    cells = [
        replace(cell(), problem={**about, **one.record("both", 7)})
        for one in squares()
        if (one.dim, one.seq) != (64, 2048)
    ]
    made = document(cells)
    (title,) = wording.sections(made)
    (rates,) = pictures.of_section("autograd", title, made)
    lacking = (f"head dimension 64, {mask}, length 2048" for mask in ("no mask", "causal"))
    assert rates.below == f"Not measured: {'; '.join(lacking)}."


def test_pictures_without_matplotlib_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"warploom\[plot\]"):
        pictures.draw("bench_gemm", GRID, tmp_path)

"""Every text of a picture can be read, and nobody reads what a library raised.

Captions once were six times as wide as their pictures and covered each other, and a footnote was
an error of FlashInfer's. What is written into the files is measured here by other means than those
of the check that refuses to write them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import absences, lettering, pictures, plots, report, wording
from benchmarks.families import family_of
from benchmarks.peers import gemm
from warploom.runtime.contest import Cell, Entry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
COMMITTED = sorted(
    path
    for path in ROOT.glob("**/*.svg")
    if not {"build", ".venv", ".git"} & {*path.relative_to(ROOT).parts}
)
MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11", "date": "2026-11-21"}
ENDLESS = "a name that does not end, of a library that says $x_1$ & <all> that it can do, " * 4
RAISED = """RuntimeError: Error in function 'run' at /opt/library/allocator.h:49: Cannot go on, \
because of something that takes many more words than anybody wants to read in a caption.
Traceback (most recent call last):
  File "/opt/library/run.py", line 3, in run
    raise RuntimeError(0x7f0000)"""


# ---- What is written -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of text in an SVG, and its box: from the top left, in units of the picture."""

    text: str
    left: float
    right: float
    top: float
    bottom: float


def lines(picture: str) -> list[Line]:
    """Every text of a picture, by the outlines of its letters."""
    return [line(one) for one in ElementTree.fromstring(picture).iter() if one.tag.endswith("text")]


@functools.cache
def outline(text: str, size: float) -> tuple[float, float, float, float]:
    """The left, top, right and bottom of a text that begins at 0."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    prop = FontProperties(family="DejaVu Sans")
    box = TextPath((0, 0), text, size=size, prop=prop, usetex=False).get_extents()
    return box.x0, -box.y1, box.x1, -box.y0


def line(element: ElementTree.Element) -> Line:
    assert not list(element) and element.text
    style, placed = element.attrib["style"], element.attrib.get("transform", "")
    size = re.search(r"font-size: ([\d.]+)px", style)
    assert size and "'DejaVu Sans'" in style
    anchor = re.search(r"text-anchor: (\w+)", style)
    x, y = float(element.attrib.get("x", 0)), float(element.attrib.get("y", 0))
    if moved := re.match(r"translate\((\S+) (\S+)\)", placed):
        x, y = float(moved[1]), float(moved[2])
    turned = re.search(r"rotate\((-?[\d.]+)", placed)
    angle = math.radians(float(turned[1]) if turned else 0.0)
    left, top, right, bottom = outline(element.text, float(size[1]))
    share = {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor[1] if anchor else "start"]
    start = -share * (left + right)
    corners = list(itertools.product((start + left, start + right), (top, bottom)))
    across = [x + u * math.cos(angle) - v * math.sin(angle) for u, v in corners]
    down = [y + u * math.sin(angle) + v * math.cos(angle) for u, v in corners]
    return Line(element.text, min(across), max(across), min(down), max(down))


def illegible(picture: str) -> list[str]:
    """The texts that leave the canvas or cover another one."""
    canvas = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    assert canvas
    wide, high = float(canvas[1]), float(canvas[2])
    found = lines(picture)
    assert found
    outside = [
        one.text
        for one in found
        if min(one.left, one.top) < 0 or one.right > wide or one.bottom > high
    ]
    return outside + [
        f"{one.text} / {other.text}"
        for one, other in itertools.combinations(found, 2)
        if min(one.right, other.right) > max(one.left, other.left)
        and min(one.bottom, other.bottom) > max(one.top, other.top)
    ]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_each_text_of_each_picture_is_in_its_canvas_and_apart_from_others(path: Path) -> None:
    assert illegible(path.read_text()) == []


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_pictures_are_as_wide_as_a_page_shows_them_and_their_letters_large_enough(
    path: Path,
) -> None:
    """A page shows 850 pixels; 7.5 points are 10 of them."""
    text = path.read_text()
    wide = re.search(r'width="([\d.]+)pt"', text)
    assert wide and float(wide[1]) / 72 * 96 <= 860
    assert min(map(float, re.findall(r"font-size: ([\d.]+)px", text))) >= 7.5


def test_pictures_are_the_only_images_of_the_repository() -> None:
    assert {path.parent for path in COMMITTED} == {ROOT / "docs" / "pictures"}
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (document.parent / target).resolve()
        for document in documents
        for target in re.findall(r"!\[.*?\]\((.*?)\)", document.read_text())
    }
    assert shown == {*COMMITTED}


def test_the_measure_sees_what_leaves_its_canvas_and_what_overlaps() -> None:
    font = "font-size: 10px; font-family: 'DejaVu Sans'"
    texts = {
        "out at the left": 'style="{}; text-anchor: end" x="20" y="20"',
        "inside": 'style="{}; text-anchor: middle" x="100" y="40"',
        "over it": 'style="{}" transform="translate(95 44)"',
        "upright and apart from all others": 'style="{}" transform="translate(180 90) rotate(-90)"',
    }
    written = "".join(f"<text {how.format(font)}>{text}</text>" for text, how in texts.items())
    assert illegible(f'<svg viewBox="0 0 200 100">{written}</svg>') == [
        "out at the left",
        "upright and apart from all others",
        "inside / over it",
    ]


# ---- What refuses to write it --------------------------------------------------------------------


def test_results_are_drawn_so_that_they_can_be_read() -> None:
    """The largest of each kind: all were drawn when they were written, and are read above."""
    found = report.pictures(report.documents())
    assert len(found) == len(COMMITTED)
    found.sort(key=lambda one: len(json.dumps(one.data)))
    kinds: Any = [one.paint for one in found]  # bars, heat, ..., with what they paint
    largest = {kind.func: one for kind, one in zip(kinds, found, strict=True)}
    assert len(largest) > 2
    for one in largest.values():
        one.drawn()


def bare() -> Figure:
    figure: Figure = plots.figure(144, 72)
    figure.set_layout_engine("none")
    return figure


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([(0.1, 0.5, "a line that is wider than two inches", 0)], "leaves the canvas"),
        ([(0.5, 0.1, "an upright line that is too long", 90)], "leaves the canvas"),
        ([(0.1, 0.5, "one text", 0), (0.2, 0.55, "another", 0)], "overlap"),
        ([(0.1, 0.5, "one text", 0), (0.1, 0.1, "another\nin lines\nup to it", 0)], "overlap"),
    ],
)
def test_a_picture_that_cannot_be_read_is_not_written(
    texts: Sequence[tuple[float, float, str, float]], said: str, tmp_path: Path
) -> None:
    def paint() -> Figure:
        figure = bare()
        for x, y, text, angle in texts:
            figure.text(x, y, text, rotation=angle)
        return figure

    with pytest.raises(lettering.PictureError, match=said):
        pictures.Picture("one", "a picture", [], paint).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_texts_that_stand_apart_are_no_fault() -> None:
    figure = bare()
    figure.text(0.05, 0.7, "above", fontsize=10)
    figure.text(0.05, 0.4, "below it\nin two lines", fontsize=10)
    figure.text(0.9, 0.1, "upright", fontsize=10, rotation=90)
    lettering.check(figure)


@pytest.mark.parametrize("text", [ENDLESS, "x" * 300, "short", "", "CUDA 错误"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_fitted_text_has_the_width_that_there_is(text: str, count: int) -> None:
    rows = lettering.fitted(text, 120, 9, count).split("\n")
    assert len(rows) <= count
    assert all(lettering.width(row, 9) <= 120 for row in rows)
    assert lettering.width(lettering.shortened(text, 120, 9), 9) <= 120
    if text == "short":
        assert rows == [text] and lettering.shortened(text, 120, 9) == text


def test_names_are_shortened_in_their_middle_since_they_differ_at_their_ends() -> None:
    long = "a name that goes on and on, batch "
    found = {lettering.shortened(f"{long}{batch}", 120, 9) for batch in (1, 8, 64)}
    assert len(found) == 3 and all(name.startswith("a name") and "…" in name for name in found)


# ---- The worst case ------------------------------------------------------------------------------


def ratios(rows: int, numbers: Sequence[int]) -> dict[tuple[str, int], float]:
    names = [f"{ENDLESS}{row}" for row in range(rows)]
    fields = itertools.product(names, numbers)
    return {field: 0.01 * 1.07 ** (index % 170) for index, field in enumerate(fields)}


@pytest.mark.parametrize(("rows", "axis"), [(2, ("M", "M, rows")), (14, (ENDLESS, ENDLESS))])
@pytest.mark.parametrize(
    "groups", [[[1, 2]], [[1 << n for n in range(31)], [3, 5, 10**9 + 1]], [[1 << 30], [3]]]
)
def test_a_heat_map_of_anything_can_be_read(
    rows: int, axis: tuple[str, str], groups: list[list[int]]
) -> None:
    fields = ratios(rows, [number for group in groups for number in group])
    lettering.check(plots.heat(fields, groups, ENDLESS, axis))


@pytest.mark.parametrize(("count", "spread"), [(1, 1.0), (2, 1000.0), (3, 1.004), (17, 1000.0)])
def test_sorted_ratios_of_anything_can_be_read(count: int, spread: float) -> None:
    values = [(spread ** (step / 10), "won") for step in range(-10, 11)]
    panels = {f"{place} {ENDLESS}": values for place in range(count)}
    lettering.check(plots.ranked(panels, dict.fromkeys(panels, ENDLESS), ENDLESS))


@pytest.mark.parametrize("numbers", [[512], [512, 513, 514], [2**n for n in range(3, 24)]])
@pytest.mark.parametrize(("places", "contenders"), [([("no mask", "d64")], 2), (None, 19)])
def test_rates_of_anything_can_be_read(
    numbers: list[int], places: list[tuple[str, str]] | None, contenders: int
) -> None:
    places = places or [(f"{row} {ENDLESS}", f"{n} {ENDLESS}") for row in range(3) for n in "abc"]
    names = ["Warploom", *(f"{ENDLESS}{index}" for index in range(contenders - 1))]
    curves: Mapping[str, Any] = {
        name: [(number, 100.0 * index + 1) for number in numbers]
        for index, name in enumerate(names)
    }
    lettering.check(plots.rates(dict.fromkeys(places, curves), names[:4], ENDLESS, ENDLESS))


def test_lines_of_a_chart_differ_where_there_are_many(tmp_path: Path) -> None:
    names = [str(index) for index in range(12)]
    styles = plots._styles(names[:5], names)
    assert len({styles[name] for name in names}) == len(names)


def case(index: int, m: int, n: int) -> Cell:
    """A product with many baselines, of which most raised something."""
    known = [f"baseline {place}" for place in range(3)]
    lost = [f"{ENDLESS}{place}" for place in range(20)]
    entries = [Entry("warploom", 1e-5, 0.01, error_share=0.5)]
    entries += [Entry(name, (1 + index / 50) * 1e-5, 0.01, error_share=0.5) for name in known]
    entries += [Entry(name, absent=f"{place}: {RAISED}") for place, name in enumerate(lost)]
    problem = {"family": "gemm", "cells": "llm", "type": "bf16", "m": m, "n": n, "k": 4096}
    return Cell(f"bf16 {m}x{n}", problem, tuple(entries))


def test_a_run_with_many_absent_baselines_is_drawn_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gemm.FAMILY.kinds, "bf16", ENDLESS)
    sizes = [(m, n) for m in (1, 16, 3) for n in (4096, 6144)]
    cells = [case(index, *size).as_json() for index, size in enumerate(sizes)]
    machine = {**MACHINE, "gpu": f"NVIDIA {ENDLESS}"}
    document = {"benchmark": "worst", "machine": machine, "states": [], "cells": cells}
    paths = pictures.draw("worst", document, tmp_path)
    assert len(paths) == 2
    for path in paths:
        assert illegible(path.read_text()) == []
        assert "allocator" not in path.read_text() and "Traceback" not in path.read_text()
    told = absences.absences(cells)
    assert "refused: " in told
    assert not any(part in told for part in ("allocator", "Error", "/opt", "Traceback", "0x"))


# ---- Why a baseline is missing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("FlashAttention-4: No module named 'flash_attn'", "not installed"),
        ("triton is not installed", "not installed"),
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 3 GiB.", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "out of memory"),
        ("Increase the workspace buffer size.", "its workspace was too small"),
        ("B.shape[1] must be a multiple of _128", "does not support this shape"),
        ("No available kernel. Aborting execution.", "does not support this shape"),
        ("expected scalar type Half but found BFloat16", "does not support this dtype"),
        ("NotImplementedError: this is not implemented", "does not support this operation"),
        ("SIGSEGV", "it crashed"),
        ("ValueError: what is this? It is nothing.", "refused: what is this?"),
        (RAISED, "refused: Cannot go on, because of something that takes many more…"),
        ("/tmp/library.py:3", "refused"),
        ("x" * 100, f"refused: {'x' * absences.LONGEST}…"),
        ("\x1b[31m<b> *red* | [a](b) `c` $d$\x1b[0m", "refused: b red a (b) c d"),
        ("", "refused"),
    ],
)
def test_what_a_library_raised_is_told_in_a_few_words(raised: str, words: str) -> None:
    assert absences.reason(raised, {}) == words


def test_a_familys_own_words_go_before_those_for_all() -> None:
    assert absences.reason("No module named 'x'", {"named 'x'": "not here"}) == "not here"


def test_baselines_that_lack_alike_are_told_together() -> None:
    entries = tuple(Entry(name, absent="No module named 'x'") for name in ("first", "second"))
    one = replace(case(0, 1, 4096), entries=(Entry("warploom", 1e-5), *entries))
    assert absences.absences([one.as_json()]) == "first, second in the only case (not installed)"


def test_every_absence_of_the_results_is_in_the_table() -> None:
    """Also what the files have of FlashInfer, of Machete and of others, raw as it was raised."""
    raised = {
        (entry["absent"], absences.reason(entry["absent"], family_of(cell).absences))
        for document in report.documents().values()
        for cell in document["cells"]
        for entry in cell["entries"]
        if entry["absent"]
    }
    assert len(raised) > 20
    assert [pair for pair in raised if pair[1].startswith("refused") or len(pair[1]) > 60] == []
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert not any(part in page for part in ("aligned_alloc", "AlignedAllocator", ".cuh", "/__w"))


def test_captions_of_baselines_say_in_how_many_cases() -> None:
    assert [wording.share(*pair) for pair in ((1, 3), (3, 3), (1, 1))] == [
        "1 of 3 cases",
        "all 3 cases",
        "the only case",
    ]

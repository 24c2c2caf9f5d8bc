"""The page of a kernel: both sides and their links, numbers of the layout, and no network."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import warploom
from warploom.cli import main
from warploom.errors import ConfigurationError, RecordsError
from warploom.generator import configurations, gpus, records_file, rules
from warploom.generator.families import every, family
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec, parse_name
from warploom.reports import disassembly, instructions, measured, report, sections, shared_memory
from warploom.reports.cubin import Cubin

GEMM = parse_name("gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c")
MOST_BYTES = 3 << 20

# What nvdisasm prints, cut to a loop: a stand-in answers with it, so that no tool has to be here.
LINES = """
//--------------------- .text.NAME --------------------------
\t.section\t.text.NAME,"ax",@progbits
.text.NAME:
\t//## File "/tmp/FILE.cu", line 300
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/opt/include/cute/arch/barrier.h", line 5 inlined at "/tmp/FILE.cu", line 302
\t//## File "/tmp/FILE.cu", line 302
.L_x_1:
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0020*/                   FADD R2, R2, R3 ;
        /*0030*/                   IADD3 R4, R4, 0x1, RZ ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
\t//## File "/tmp/FILE.cu", line 310
        /*0050*/                   EXIT ;
        /*0060*/                   NOP ;
"""
LIVE = re.sub(r"^(\s+/\*(\w+)\*/.*;)$", r"\1  // |  7  |   1    |        |", LINES, flags=re.M)
STAND_IN = """#!{python}
import sys
name, file = {name!r}, {file!r}
text = {live!r} if "-lrm" in sys.argv else {lines!r}
print(text.replace("NAME", name).replace("FILE", file))
"""


class Page(HTMLParser):
    """Anchors, links and what would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.rows = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if anchor := given.get("id"):
            assert anchor not in self.ids, f"{anchor} is there twice"
            self.ids.add(anchor)
        if tag == "a" and (link := given.get("href")):
            self.links.append(link)
        self.rows += "data-l" in given
        self.loaded += [given[name] or "" for name in ("src", "srcset", "data") if name in given]
        if tag in ("link", "iframe", "object", "embed", "base"):
            self.loaded.append(tag)


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """A kernel is compiled with line information once for all tests: that takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_compiled", cache(report._compiled))
        yield


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvdisasm that is the first in PATH."""
    tool = tmp_path / "bin" / "nvdisasm"
    tool.parent.mkdir()
    told = {"name": GEMM.name, "file": report._file(GEMM), "live": LIVE, "lines": LINES}
    tool.write_text(STAND_IN.format(python=sys.executable, **told))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    return tool


@pytest.fixture
def no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "find", lambda: None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


def smallest(name: str) -> KernelSpec:
    """The first kernel of a family's smoke.yaml."""
    path = next(one for one in configurations.smoke() if one.parent.name == name)
    return expand_file(path).specs[0]


# ---- The page ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_in")
def test_the_page_has_both_sides_and_links_resolve_both_ways() -> None:
    text = warploom.kernel_report(GEMM).html
    page = Page(text)
    assert page.rows == 7
    inner = [link for link in page.links if link.startswith("#")]
    assert inner == page.links
    assert {link[1:] for link in inner} <= page.ids
    assert 'id="L302"' in text and 'href="#s0-10">4</a>' in text  # line 302 has four instructions
    assert 'id="s0-10" data-l="302"' in text and 'href="#L302">302</a>' in text
    assert "cute/arch/barrier.h:5" in text
    assert "HGMMA.64x256x16" in text and ">7</s>" in text  # live registers
    assert len(re.findall(r'class="row" id="L\d+"', text)) == len(render(GEMM).split("\n"))


@pytest.mark.usefixtures("stand_in")
def test_the_page_needs_no_network() -> None:
    text = warploom.kernel_report(GEMM).html
    assert Page(text).loaded == []
    assert re.findall(r"(?:https?:)?//[\w-]+\.[\w.]+/|url\(|@import|fetch\(|XMLHttp", text) == []
    assert len(text.encode()) < MOST_BYTES
    assert "prefers-color-scheme: dark" in text


@pytest.mark.skipif(disassembly.find() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize("name", ["gemm", "attention_forward", "cast", "attention_decode"])
def test_every_instruction_is_shown_once_with_its_line(name: str) -> None:
    found = warploom.kernel_report(smallest(name))
    page, total = Page(found.html), sum(len(code.instructions) for code in found.codes)
    assert found.missing == ""
    assert page.rows == total == sum(code.entry.instructions for code in found.codes)
    assert {link[1:] for link in page.links} <= page.ids
    shown = [one for code in found.codes for one in code.instructions]
    assert sum(one.line > 0 for one in shown) > 0.98 * len(shown)
    assert all(one.live is not None for one in shown if one.opcode != "NOP")
    most = max(one.live or 0 for one in shown)
    assert 8 < most <= 255
    assert len(found.html.encode()) < MOST_BYTES
    if name == "gemm":
        loops = [instructions.mix(one.instructions) for one in found.codes[0].loops]
        assert any(mix["tensor core"] for mix in loops)


@pytest.mark.usefixtures("no_tool")
def test_without_nvdisasm_it_says_so_and_shows_what_the_cubin_tells(tmp_path: Path) -> None:
    result = run(GEMM.name, "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    assert "nvdisasm was not found" in result.stderr and "nvidia-cuda-nvdisasm" in result.stderr
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.rows == 0 and {link[1:] for link in page.links} <= page.ids
    assert "nvdisasm was not found" in text and "No disassembly" in text
    found = warploom.kernel_report(GEMM)
    entry = found.codes[0].entry
    assert entry.name == GEMM.name and entry.instructions > 100
    assert f'<td class="n">{entry.instructions}</td>' in text
    assert f'<td class="n">{found.codes[0].resources.registers}</td>' in text


def test_an_nvdisasm_that_fails_is_told_too(stand_in: Path) -> None:
    stand_in.write_text("#!/bin/sh\necho 'nvdisasm fatal: no such SM' >&2\nexit 1\n")
    found = warploom.kernel_report(GEMM)
    assert "could not disassemble" in found.missing and "no such SM" in found.missing
    assert "no such SM" in found.html


@pytest.mark.usefixtures("no_tool")
def test_a_notebook_shows_the_facts() -> None:
    found = warploom.kernel_report(GEMM)
    assert GEMM.name in found._repr_html_() and "230,400" in found._repr_html_()
    short = GEMM._repr_html_()
    assert GEMM.digest in short and "kernel_report" in short and "<script" not in short


# ---- Its numbers ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tool")
@pytest.mark.parametrize("name", ["gemm", "attention_forward", "mixed_gemm"])
def test_the_map_of_shared_memory_is_the_layouts(name: str) -> None:
    spec = smallest(name)
    layout = family(name).layout(spec)
    found = warploom.kernel_report(spec)
    assert 0 < found.declared <= layout.shared_bytes == found.shared_bytes
    assert layout.shared_bytes - found.declared < 2048
    ends = [(one.offset, one.offset + one.bytes) for one in found.buffers]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] <= found.declared
    assert any(one.barrier for one in found.buffers)
    if name == "gemm":
        rings = {one.name: one for one in found.buffers}
        stage = sum(rings[name].bytes // rings[name].stages for name in "ab")
        assert stage == layout.stage_bytes  # type: ignore[attr-defined]
        assert {rings[name].stages for name in ("a", "b", "full", "empty")} == {
            spec.schedule.stages  # type: ignore[attr-defined]
        }
    assert f"{layout.shared_bytes:,}" in found.html


def test_members_of_one_declaration_are_told_apart() -> None:
    source = """struct SharedStorage {
  alignas(1024) uint8_t a[kStages][Tile<1, 2>::kBytes];  // tiles
  struct alignas(128) { float rows[2][kRows]; } statistics[kStages];
  FullBarrier k_full, v_full, q_full[kStages];  // arrived
};
"""
    name, members = shared_memory.members(source)
    assert name == "SharedStorage"
    assert [(one.name, one.ring, one.line) for one in members] == [
        ("a", True, 2),
        ("statistics", True, 3),
        ("k_full", False, 4),
        ("v_full", False, 4),
        ("q_full", True, 4),
    ]
    assert [members[i].says for i in (0, 4)] == ["tiles", "arrived"]
    assert shared_memory.probe("no struct") == ""


@pytest.mark.usefixtures("no_tool")
def test_the_machine_code_is_held_against_that_of_the_cache() -> None:
    """Line information and the table of shared memory must not change what is shown."""
    from warploom.generator import build

    spec = smallest("cast")
    build.build(spec)
    assert [code.same for code in warploom.kernel_report(spec).codes] == [True]


def test_the_rules_are_shown_with_their_values() -> None:
    with rules.noting() as checks:
        family("gemm").reasons(GEMM.architecture, GEMM.operation, GEMM.schedule)
    named = {one.name: one for one in checks.named}
    assert named["shared memory"].value == family("gemm").layout(GEMM).shared_bytes
    assert named["shared memory"].rule == "at most 232448 bytes"
    assert checks.total > len(checks.named) > 4
    with rules.noting() as others:
        pass
    assert others.total == 0 and others.named == []


def test_no_measured_time_is_far_below_the_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of twice the bytes or operations would put kernels at twice what a GPU can do."""
    monkeypatch.setattr(records_file, "read", cache(records_file.read))  # for all families
    count = 0
    for described in every():
        spec = smallest(described.name)
        for problem in measured.problems(spec):
            work = described.work(spec.operation, problem.shape)
            if work is not None:
                kind = gpus.kind(problem.gpu)
                floor = max(
                    work.flops / kind.flops.get(work.bits, kind.flops[16]),
                    work.bytes / kind.bytes_per_second,
                )
                assert problem.timings[0].seconds > 0.85 * floor, (problem.gpu, problem.shape)
                count += 1
    gemm = GemmOperation(a="bf16", b="bf16", d="bf16")
    work = family("gemm").work(gemm, GemmShape(2, 3, 5))
    assert work is not None and (work.flops, work.bytes) == (60, 2 * (10 + 15 + 6))


def test_measured_times_are_those_of_the_tuned_configs() -> None:
    problems = measured.problems(GEMM)
    rows = sections.rows(GEMM, problems)
    assert len(rows) >= 5
    shape, seconds = rows[0][1], rows[0][2] / 1e6
    timed = next(one for one in problems if str(one.shape) == shape and one.gpu == rows[0][0])
    mine = timed.of(GEMM.schedule)
    assert mine is not None and mine.seconds == pytest.approx(seconds)
    assert timed.timings[0].seconds <= mine.seconds
    figure = sections.scatter(GEMM, problems, gpus.kind(rows[0][0]))
    assert figure is not None and figure.count("mark0") >= 1
    roof = sections.roofline(GEMM, problems, gpus.kind(rows[0][0]))
    assert roof is not None and "TFLOP/s" in roof


# ---- What it is asked ----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_sets")
def test_a_kernel_that_there_is_not_is_a_sentence(tmp_path: Path) -> None:
    result = run("gemm_sm90a_bf16_128x999x64_00000000", "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 1 and not [*tmp_path.iterdir()]
    assert "gemm_sm90a_bf16_128x999x64_00000000" in result.stderr
    assert "Traceback" not in result.output
    assert "warploom list FILE" in result.stderr
    unknown = run(GEMM.name, "--gpu", "H300")
    assert unknown.exit_code == 1 and "did you mean" in unknown.stderr.lower()


@pytest.mark.usefixtures("no_tool")
def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        warploom.kernel_report(GEMM, tmp_path / "absent" / "page.html")


def test_a_journal_that_is_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("no journal\n")
    with pytest.raises(RecordsError):
        warploom.kernel_report(GEMM, journal=path)


@pytest.mark.usefixtures("no_tool")
def test_json_is_one_object(tmp_path: Path) -> None:
    result = run(GEMM.digest[:8], "-o", str(tmp_path / "page.html"), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["name"] == GEMM.name and told["file"] == str(tmp_path / "page.html")
    assert told["report"]["shared memory"] == "230,400 of 232,448 bytes"
    assert "nvdisasm" in told["no disassembly"]


def test_help_has_examples() -> None:
    told = run("--help").stdout
    assert told.count("warploom report ") >= 3


# ---- Parts ---------------------------------------------------------------------------------------


def test_a_cubin_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        Cubin(b"\x7fELF\x01\x01" + bytes(100))


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("HGMMA.64x256x16.F32.BF16", "tensor core"),
        ("HMMA.16816.F32.BF16", "tensor core"),
        ("MUFU.EX2", "special function"),
        ("FFMA", "floating point"),
        ("HADD2.F32", "floating point"),
        ("F2FP.BF16.F32.PACK_AB", "floating point"),
        ("IMAD.MOV.U32", "integer and address"),
        ("UIADD3", "integer and address"),
        ("LDSM.16.MT88.4", "shared memory"),
        ("UTMALDG.2D", "global and constant memory"),
        ("LDG.E.128", "global and constant memory"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "synchronization"),
        ("WARPGROUP.ARRIVE", "synchronization"),
        ("SHFL.IDX", "synchronization"),
        ("REDUX.MAX", "synchronization"),
        ("BAR.SYNC.DEFER_BLOCKING", "synchronization"),
        ("BRA", "moves and control"),
        ("R2UR", "moves and control"),
    ],
)
def test_opcodes_are_of_the_class_that_people_expect(opcode: str, expected: str) -> None:
    assert instructions.class_of(opcode) == expected


def test_loops_are_found_by_their_backward_branches(tmp_path: Path, stand_in: Path) -> None:
    found = disassembly.disassemble(stand_in, b"", f"{report._file(GEMM)}.cu")[GEMM.name]
    assert [one.target for one in found if one.target is not None] == [0x10]
    (loop,) = instructions.loops(found)
    assert (loop.first, loop.last, len(loop.instructions), loop.lines) == (
        0x10,
        0x40,
        4,
        (302, 302),
    )
    assert instructions.mix(loop.instructions)["tensor core"] == 1
    assert sum(instructions.mix(found).values()) == 6  # without the padding

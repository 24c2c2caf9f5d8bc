"""The page of a report: one file of HTML, with its style and script inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer

import warploom
from warploom.reports import sections
from warploom.reports.instructions import CLASSES, class_of

if TYPE_CHECKING:
    from warploom.reports.disassembly import Instruction
    from warploom.reports.report import Code, KernelReport

_KINDS = {name: f"k{number}" for number, name in enumerate(CLASSES)}  # classes of CSS


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the shared-memory bar; left and width are percent of it."""

    name: str
    kind: str
    left: float
    width: float
    lane: int
    title: str


def page(report: KernelReport) -> str:
    """Return the whole page."""
    spec, code = report.spec, report.codes[0]
    return _template("page.html.jinja").render(
        report=report,
        version=warploom.__version__,
        lines=_source(report.source),
        first=_first_instructions(report.codes),
        kinds=_KINDS,
        shares=_shares,
        map=_map(report),
        live=code.live,
        checks=report.checks,
        layout=report.layout,
        roofline=sections.roofline(spec, report.problems, report.gpu),
        scatter=sections.scatter(spec, report.problems, report.gpu),
        timed=sections.rows(spec, report.problems),
        sass=_sass,
    )


def summary(report: KernelReport) -> str:
    """Return the first part of the page, for a notebook."""
    return _template("summary.html.jinja").render(report=report)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("warploom.reports", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


def _source(source: str) -> list[Markup]:
    """The lines of the source, colored."""
    formatter = HtmlFormatter(nowrap=True, classprefix="c-")
    text = highlight(source, CudaLexer(stripnl=False, ensurenl=False), formatter)
    return [Markup(line) for line in text.split("\n")]  # noqa: S704 (Pygments escaped it)


def _first_instructions(codes: Sequence[Code]) -> dict[int, tuple[str, int]]:
    """Line -> the anchor of its first instruction, and how many it has."""
    found: dict[int, tuple[str, int]] = {}
    for number, code in enumerate(codes):
        for one in code.instructions:
            if one.line:
                anchor, count = found.get(one.line, (f"s{number}-{one.address:x}", 0))
                found[one.line] = (anchor, count + 1)
    return found


def _sass(number: int, code: Code) -> list[tuple[str, Instruction, str, str]]:
    """The rows of an entry's code: anchor, instruction, class of CSS, text."""
    return [
        (f"s{number}-{one.address:x}", one, _KINDS[class_of(one.opcode)], one.text)
        for one in code.instructions
    ]


def _shares(mix: Mapping[str, int]) -> list[tuple[str, str, int, float]]:
    """Class, its class of CSS, count, and percent, of those that there are."""
    total = sum(mix.values()) or 1
    return [
        (name, _KINDS[name], count, 100 * count / total) for name, count in mix.items() if count
    ]


def _map(report: KernelReport) -> list[Part]:
    """The parts of the shared-memory bar: what overlaps, in a union, is in lanes of its own."""
    total = max(report.shared_bytes, report.declared, 1)
    parts: list[Part] = []
    ends: list[int] = []  # of the lanes
    for number, one in enumerate(sorted(report.buffers, key=lambda one: one.offset)):
        lane = next((i for i, end in enumerate(ends) if end <= one.offset), len(ends))
        ends[lane : lane + 1] = [one.offset + one.bytes]
        size = one.bytes // one.stages
        for stage in range(one.stages):
            name = f"{one.name}[{stage}]" if one.stages > 1 else one.name
            start = one.offset + stage * size
            title = f"{name}: {size:,} bytes at {start:,}"
            left, width = 100 * start / total, 100 * size / total
            parts.append(Part(name, f"k{number % 7}", left, width, lane, title))
    return parts

"""The figures of a report as SVG: drawn in the page's own colors, in light and in dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 1160  # of the page's content at 1280 pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 40


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a figure: where it is, its class of CSS, and what it says on hovering."""

    x: float
    y: float
    kind: str
    says: str


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, in powers where it is `log`; `ticks` are values and texts."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def scale(self, start: float, end: float) -> Callable[[float], float]:
        """Return what places a value between two coordinates."""
        change = math.log10 if self.log else float
        low, high = change(self.low), change(self.high)
        span = high - low or 1.0
        return lambda value: start + (end - start) * (change(value) - low) / span


class Figure:
    """A plot with two axes, grown by one kind of mark after the other."""

    def __init__(
        self, title: str, x: Axis, y: Axis, *, width: int = WIDTH, height: int = 260
    ) -> None:
        """Draw the axes; `title` is what a screen reader says."""
        self._title, self._size = title, (width, height)
        self._right, self._bottom = width - _RIGHT, height - _BOTTOM
        self.x, self.y = x.scale(_LEFT, self._right), y.scale(self._bottom, _TOP)
        self._parts = [*self._axes(x, y)]

    def band(self, low: float, high: float, says: str) -> None:
        """Shade a range of x over the whole height."""
        left, right = self.x(low), self.x(high)
        self._add(
            f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{max(1.0, right - left):.1f}" '
            f'height="{self._bottom - _TOP}"><title>{escape(says)}</title></rect>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Join points."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self._add(f'<polyline class="{kind}" points="{path}"/>')

    def label(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Write a text above a place."""
        self._add(
            f'<text x="{self.x(x):.1f}" y="{self.y(y) - 5:.1f}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def marks(self, marks: Sequence[Mark], radius: float = 4.0) -> None:
        """Draw points."""
        for one in marks:
            self._add(
                f'<circle class="{one.kind}" cx="{self.x(one.x):.1f}" cy="{self.y(one.y):.1f}" '
                f'r="{radius}"><title>{escape(one.says)}</title></circle>'
            )

    def svg(self) -> Markup:
        """Return the figure."""
        width, height = self._size
        opening = (
            f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self._title)}">'
        )
        return Markup("\n".join([opening, *self._parts, "</svg>"]))  # noqa: S704 (texts are escaped)

    def _axes(self, x: Axis, y: Axis) -> list[str]:
        parts = []
        for value, text in x.ticks:
            at = self.x(value)
            parts.append(
                f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{self._bottom}"/>'
            )
            parts.append(
                f'<text x="{at:.1f}" y="{self._bottom + 15}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
        for value, text in y.ticks:
            at = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{self._right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            )
            parts.append(
                f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            )
        middle, half = (_LEFT + self._right) / 2, (_TOP + self._bottom) / 2
        parts.append(
            f'<text class="title" x="{middle:.0f}" y="{self._bottom + 33}" text-anchor="middle">'
            f"{escape(x.title)}</text>"
        )
        parts.append(
            f'<text class="title" x="14" y="{half:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 14 {half:.0f})">{escape(y.title)}</text>'
        )
        return parts

    def _add(self, text: str) -> None:
        self._parts.append(text)


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values from `low` to `high`."""
    rough = max(high - low, 1e-12) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= rough)
    first = math.ceil(low / step)
    return [i * step for i in range(first, int(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Return the powers of ten from below `low` to above `high`."""
    return [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]

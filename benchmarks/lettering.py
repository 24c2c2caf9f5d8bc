"""Text in pictures: fitted to the space that it has, and checked once it is drawn.

Names and titles come from results, so that they may be of any length. Needs matplotlib.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import combinations
from math import ceil
from typing import Any

from warploom.errors import WarploomError

_CUT = "…"
_LINE = 1.2  # of the size: from one line to the next
_INCH = 72  # points
_TOUCH = 0.5  # points by which boxes may overlap: they are rounded


class PictureError(WarploomError):
    """A picture with a text that leaves its canvas or covers another text."""


# ---- Before it is drawn --------------------------------------------------------------------------


@cache
def width(text: str, size: float) -> float:
    """Return how wide a line is, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return float(
        text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0]
    )


def fitted(text: str, room: float, size: float, lines: int = 1) -> str:
    """Return a text wrapped at spaces to `lines` lines of `room` points, cut where it is longer."""
    words, rows = text.split(), list[str]()
    while words and len(rows) < lines - 1:
        taken = max(1, _most(len(words), room, size, partial(_joined, words)))
        rows.append(_begun(" ".join(words[:taken]), room, size))
        words = words[taken:]
    return "\n".join([*rows, _begun(" ".join(words), room, size)] if words else rows)


def _joined(words: Sequence[str], count: int) -> str:
    return " ".join(words[:count])


def _begun(line: str, room: float, size: float) -> str:
    """The line, or its beginning."""

    def begun(kept: int) -> str:
        return line if kept == len(line) else line[:kept] + _CUT

    return begun(_most(len(line), room, size, begun))


def shortened(text: str, room: float, size: float) -> str:
    """Return a text cut in its middle to `room` points: names of a kind differ at their ends."""
    line = " ".join(text.split())

    def without_middle(kept: int) -> str:
        cut = line[: ceil(kept / 2)] + _CUT + line[len(line) - kept // 2 :]
        return line if kept == len(line) else cut

    return without_middle(_most(len(line), room, size, without_middle))


def _most(count: int, room: float, size: float, text: Callable[[int], str]) -> int:
    """How many of `count` letters or words have room, by what the text of so many is."""
    if width(text(count), size) <= room:
        return count
    fits = bisect_right(range(count), room, key=lambda kept: width(text(kept), size))
    return max(0, fits - 1)


def spaced(places: Sequence[float], extents: Sequence[float]) -> list[int]:
    """Return which labels can stand side by side, by their index; the first ones go before others.

    Args:
        places: Where the middle of each is, in points.
        extents: How much room each takes.
    """
    kept: list[int] = []
    for index, (place, extent) in enumerate(zip(places, extents, strict=True)):
        if all(abs(place - places[one]) >= (extent + extents[one]) / 2 for one in kept):
            kept.append(index)
    return kept


def height(size: float, lines: int = 1) -> float:
    """Return how high so many lines are, in points."""
    return lines * _LINE * size


# ---- Once it is drawn ----------------------------------------------------------------------------


def check(picture: Any) -> None:  # noqa: ANN401 (matplotlib is optional)
    """Draw a picture in memory; raise PictureError unless each text of it can be read.

    Each line of text must be within the canvas, and apart from all others.
    """
    found = _drawn(picture)
    high, wide = picture.get_figheight() * _INCH, picture.get_figwidth() * _INCH
    faults = [
        f"{text!r} leaves the canvas"
        for text, box in found
        if min(box.x0, box.y0) < -_TOUCH or box.x1 > wide + _TOUCH or box.y1 > high + _TOUCH
    ]
    faults += [
        f"{one!r} and {other!r} overlap"
        for (one, box), (other, beside) in combinations(found, 2)
        if _overlap(box.intervalx, beside.intervalx) and _overlap(box.intervaly, beside.intervaly)
    ]
    if faults:
        raise PictureError(
            f"{len(faults)} texts of a picture cannot be read: {'; '.join(faults[:3])}",
            rule="each text is within its canvas and apart from the others",
            fix="give it more room in benchmarks/plots.py, or fit it by benchmarks/lettering.py",
        )


def _overlap(one: Iterable[float], other: Iterable[float]) -> bool:
    (low, high), (begin, end) = one, other
    return min(high, end) - max(low, begin) > _TOUCH


def _drawn(picture: Any) -> list[tuple[str, Any]]:  # noqa: ANN401
    """Each line of text that is drawn, whoever draws it, and its box in points."""
    from matplotlib.backend_bases import RendererBase
    from matplotlib.transforms import Affine2D, Bbox

    picture.set_dpi(_INCH)  # pixels are points, as in SVG
    wide, high = picture.get_size_inches() * _INCH
    found: list[tuple[str, Any]] = []

    class Recorder(RendererBase):
        def get_canvas_width_height(self) -> tuple[float, float]:
            return wide, high

        def draw_path(self, *_: Any) -> None:
            pass

        def draw_image(self, *_: Any) -> None:
            pass

        def draw_text(
            self,
            gc: Any,  # noqa: ANN401
            x: float,
            y: float,
            s: str,
            prop: Any,  # noqa: ANN401
            angle: float,
            ismath: Any = False,  # noqa: ANN401
            mtext: Any = None,  # noqa: ANN401
        ) -> None:
            length, above, descent = self.get_text_width_height_descent(s, prop, ismath)
            y = high - y  # a renderer counts from the top
            corners = Bbox.from_bounds(x, y - descent, length, above).corners()
            corners = Affine2D().rotate_deg_around(x, y, angle).transform(corners)
            if s.strip():
                found.append((s, Bbox([corners.min(axis=0), corners.max(axis=0)])))

    picture.draw(Recorder())
    return found

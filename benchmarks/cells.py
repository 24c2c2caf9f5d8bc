"""cells.yaml, the one list of what is measured, as shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

Shape = tuple[int, int, int]  # m, n, k


def cells(which: Literal["squares", "llm"], m: Sequence[int] = ()) -> list[Shape]:
    """Return the shapes of products, with these numbers of tokens or all of them."""
    listed = _gemm()
    if which == "squares":
        return [(rows, n, k) for rows, n, k in listed["squares"] if not m or rows in m]
    tokens = m or [*listed["m"], *listed["ragged_m"]]
    return [(rows, n, k) for n, k in listed["weights"] for rows in tokens]


def layers() -> dict[tuple[int, int], str]:
    """Return what each weight is, by its extents [n, k], in the order of the list."""
    listed = _gemm()
    weights = ((n, k) for n, k in listed["weights"])
    return dict(zip(weights, listed["names"], strict=True))


def trained() -> Shape:
    """Return the forward product of the layer whose training is measured."""
    m, n, k = _gemm()["trained"]
    return m, n, k


def batched() -> list[tuple[int, Shape]]:
    """Return how many products of which shape make each batch."""
    return [(batch, (m, n, k)) for batch, m, n, k in _gemm()["batched"]]


def text(shape: Shape) -> str:
    """Return a shape as the name of a cell has it."""
    return "x".join(map(str, shape))


def problem(shape: Shape, **more: Any) -> dict[str, Any]:
    """Return a shape as a cell's record has it."""
    return {**dict(zip("mnk", shape, strict=True)), **more}


@cache
def _gemm() -> dict[str, Any]:
    file = Path(__file__).with_name("cells.yaml")
    listed: dict[str, Any] = yaml.safe_load(file.read_text())["gemm"]
    return listed

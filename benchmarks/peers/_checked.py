"""What contenders of libraries have in common: how results are held, and how they refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warploom.runtime.measure import Call, largest_share


@dataclass(frozen=True, slots=True)
class Right:
    """A result in float64, how far off each element may be, and all of them together."""

    exact: torch.Tensor
    bound: torch.Tensor
    spread: float

    def share(self, out: torch.Tensor) -> float:
        """The largest error of an element, or that of all, as a share of what it may be."""
        if out.shape != self.exact.shape:
            return math.inf
        together = float((out.double() - self.exact).norm() / self.exact.norm()) / self.spread
        if math.isnan(together):
            return math.inf
        return max(together, largest_share(out, self.exact, self.bound))


def reason(error: Exception) -> str:
    """What a library said in its first line; with the kind of an error that has none of its own."""
    words = str(error).strip().partition("\n")[0]
    if isinstance(error, RuntimeError | ValueError) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def refusal(words: str) -> Call:
    """A call that says what an earlier one did."""

    def call() -> None:
        raise RuntimeError(words)

    return call

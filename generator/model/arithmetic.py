"""What the arithmetic of several families' cost models shares."""

from __future__ import annotations

import math
from collections.abc import Mapping

Value = Mapping[str, float]  # of the constants, by name
SHARPNESS = 8  # of `slowest`: two equal times take 1.09 of one


def slowest(*seconds: float) -> float:
    """The largest of times that overlap, and somewhat more where two are close."""
    return math.pow(sum(part**SHARPNESS for part in seconds), 1 / SHARPNESS)

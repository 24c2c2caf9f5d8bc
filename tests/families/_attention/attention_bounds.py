"""Bounds of masks that reach as far as 32 bits count, or beyond both ends of a sequence."""

from __future__ import annotations

from warploom.generator.families._attention import UNBOUNDED

BOUNDS = {  # left and right of a mask
    "none": [(UNBOUNDED, UNBOUNDED)],
    "causal": [(UNBOUNDED, 0), (UNBOUNDED, 2**30 - 1), (UNBOUNDED, -(2**30) + 5)],
    "window": [(70, 5), (2**30 - 1, 2**30 - 1), (-(2**30) + 70, 2**30 - 5), (UNBOUNDED, 0)],
}

"""What torch computes in the place of either pass: the scores that a trial's calls ask for."""

from __future__ import annotations

from typing import Any

from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families._attention.sdpa import Scores

TAKEN = {"causal", "window", "softcap"}  # keywords that torch's functions have something for


def scores_of(call: Arguments, keywords: dict[str, Any]) -> Scores:
    """What of q k^T counts in calls with these keywords."""
    if further := sorted(keywords.keys() - TAKEN):
        return Scores(refused=f"not measured with {', '.join(further)}")
    sizes = extents(call)
    if sizes.packed:
        return Scores(refused="torch's sdpa takes no varlen sequences")
    left, right = band(call, sizes).shifted(sizes)
    causal = call.causal is True
    return Scores(left, right, causal, call.softcap)

"""What two GPUs of a kind both say of one loop: the finalists are measured on one, then on another.

A schedule is as fast as the slower of the two says, and they are as sure of it as they are near
each other: what they do not agree on is tied, as noise is, and the default wins ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from warploom.generator.specification import KernelSpec
from warploom.tuning.journal import Result
from warploom.tuning.search import SURE, Search

Results = Mapping[KernelSpec, Result]


def works(results: Results) -> bool:
    """True where some kernel was right."""
    return any(one.outcome == "correct" for one in results.values())


def agreed(first: Results, second: Results) -> dict[KernelSpec, Result]:
    """Return the results of `first`, as far as `second` does not find otherwise.

    That has some of its kernels. What failed on either has failed. Where their times are relative
    to different kernels, since one of these failed, those of `first` stand.
    """
    comparable = _anchor(first) == _anchor(second)
    found: dict[KernelSpec, Result] = {}
    for spec, one in first.items():
        other = second.get(spec)
        if other is None or one.outcome != "correct":
            found[spec] = one
        elif other.outcome != "correct":
            found[spec] = other
        elif comparable and one.seconds and one.relative and other.relative:
            relative = max(one.relative, other.relative)
            apart = abs(one.relative - other.relative)
            found[spec] = replace(
                one,
                seconds=one.seconds * relative / one.relative,
                relative=relative,
                spread=max(one.spread or 0.0, other.spread or 0.0),
                # So that what they differ by is a tie.
                error=max(one.error or 0.0, other.error or 0.0, apart / SURE),
                noisy=one.noisy or other.noisy,
            )
        else:
            found[spec] = one
    return found


def unconfirmed(search: Search, first: Results, second: Results) -> tuple[KernelSpec, ...]:
    """What another GPU is to say more of: that nothing of a batch works, or who could win.

    Those are asked for after the kernel that their times are relative to.
    """
    if not works(first):
        return () if second else tuple(first)
    found = agreed(first, second)
    if search.stage != "final" or search.stands(found):
        return ()
    rivals = search.rivals(found)
    asked = [spec for spec in rivals if spec not in second]
    return tuple(dict.fromkeys([rivals[0], *asked])) if asked else ()


def _anchor(results: Results) -> KernelSpec | None:
    """What the times of a loop are relative to."""
    return next((spec for spec, one in results.items() if one.outcome == "correct"), None)

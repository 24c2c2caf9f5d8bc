"""How far kernels count: in 32 bits, with a sign. What would take them further is refused."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.errors import ProblemError

LARGEST = 2**31 - 1


def refuse_beyond(counted: Mapping[str, int]) -> None:
    """Raise ProblemError where a kernel would count beyond LARGEST.

    `counted` has the largest number that its arithmetic reaches, or one that is little larger, by
    what of the call it comes from.
    """
    for what, reached in counted.items():
        if reached > LARGEST:
            raise ProblemError(
                what,
                rule=f"must be smaller: kernels count to {LARGEST}, and this takes {reached}",
                fix="split the call into several",
            )

"""What two checkouts are measured by (checkouts.py): a module for each family.

Modules call what is public and import nothing else of Warploom, so that they run in any checkout:
cells are chosen by name (`--match`) where one of the two lacks what others call. Each module has
`CELLS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """A call to be timed: `make` returns it, on fresh operands, and how many bytes it moves.

    `host`: by the host's clock; else in a CUDA graph, over buffers that L2 does not hold.
    """

    name: str
    make: Callable[[], tuple[Callable[[], object], float]]
    host: bool = False

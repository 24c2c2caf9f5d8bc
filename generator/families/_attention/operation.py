"""What the operations of both passes share."""

from __future__ import annotations

from typing import Literal, get_args

Dim = Literal[32, 64, 96, 128, 192, 256]  # of a head: a kernel serves what is smaller, too
DIMS: tuple[int, ...] = get_args(Dim)

"""What the operations of both passes share."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from warploom.generator import specification

Dim = Literal[32, 64, 96, 128, 192, 256]  # of a head: a kernel serves what is smaller, too
DIMS: tuple[int, ...] = get_args(Dim)


class Operation(specification.Operation, Protocol):
    """The operation of either pass."""

    @property
    def element(self) -> Literal["fp16", "bf16"]:
        """The element type of all tensors."""
        ...

    @property
    def dim(self) -> Dim:
        """The head dimension."""
        ...

    @property
    def mask(self) -> Literal["none", "causal", "window"]:
        """The columns that a row attends to."""
        ...

    @property
    def softcap(self) -> bool:
        """Whether scores are capped."""
        ...

    @property
    def lengths(self) -> Literal["fixed", "packed"]:
        """Whether all sequences are as long."""
        ...

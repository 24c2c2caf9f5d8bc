"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.epilogue import Float
from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

VALUES = 8  # of a row, that a thread moves at once: 16 bytes of 16-bit types
LOADS = 4  # of them that a thread has in flight


@frozen
class CombineOperation:
    """What is computed: tokens from the rows that experts computed for them, or rows from tokens.
    Arithmetic is fp32.
    """

    values: Float = knob(doc="element type of rows [rows, columns] and of tokens [tokens, columns]")
    direction: Literal["combine", "permute"] = knob(
        default="combine",
        name="{}",
        doc="combine: a token is the sum of its rows; permute: a row is a copy of its token",
    )
    weights: Literal["none", Float] = knob(
        default="none",
        name="weights_{}",
        doc="element type of the weights [tokens, k] by which rows are multiplied; none: there "
        "are no weights",
    )
    dot: bool = knob(
        default=False,
        doc="permute: also compute the gradient of the weights, from the rows that were combined",
    )
    family: Literal["combine"] = knob(default="combine", doc="the kernel family")

    @property
    def bytes(self) -> int:
        """Of a value."""
        return element(self.values).bytes


@frozen
class CombineSchedule:
    """How it is computed: a thread combines columns of a token, or a warp copies a row."""

    threads: Literal[64, 128, 256, 512] = knob(name="{}", doc="threads of a CTA")

    @property
    def tile(self) -> tuple[int]:
        """Columns of a token that a CTA sums at once."""
        return (self.threads * VALUES,)


CombineSpec = KernelSpec[CombineOperation, CombineSchedule]

"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import Float
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec

VALUES = 8  # of a row, that a thread moves at once: 16 bytes of 16-bit types
LOADS = 4  # of them that a thread has in flight


@frozen
class CombineOperation:
    """What is computed: each token as the sum of the rows that experts computed for it, or each row
    as a copy of its token. Arithmetic is fp32.
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
        doc="permute, as the backward pass of combine: also compute the gradient of the weights",
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


# ---- The shape of a problem ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class CombineShape(Shape):
    """Tokens, rows of each, and their columns."""

    tokens: int
    k: int
    columns: int


@dataclass(frozen=True, slots=True)
class CombineProblem:
    """The extents of one call, and elements from row to row of what it has.

    rows      of all experts; what is no row of these counts as skipped
    weights   steps of weights from token to token, and from one choice of a token to the next
    combined  of the rows that were combined, where there are weights' gradients
    experts   in the offsets whose last one ends the rows; 0 where there are no offsets
    """

    tokens: int
    k: int
    columns: int
    rows: int
    tokens_pitch: int
    rows_pitch: int
    weights: tuple[int, int] = (0, 0)
    combined_pitch: int = 0
    experts: int = 0


# ---- What is legal -------------------------------------------------------------------------------


def operation_reasons(operation: CombineOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    if operation.dot and (operation.direction != "permute" or operation.weights == "none"):
        given = f"direction {operation.direction}, weights {operation.weights}"
        return [f"dot with {given}: must be with direction permute, and with weights"]
    return []


def schedule_reasons(
    arch: Architecture, operation: CombineOperation, schedule: CombineSchedule
) -> list[str]:
    """Why the schedule does not fit the operation: every one does."""
    return []

"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import Float
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec

VALUES = 8  # of a row, that a thread moves at once: 16 bytes of 16-bit types


@frozen
class AttentionMergeOperation:
    """What is computed: the attention output over the keys of both a and b, from the outputs and
    log-sum-exps over each. Arithmetic is fp32.
    """

    a: Float = knob(name="{}|{}_{}_{}", doc="element type of out_a [.., dim]")
    b: Float = knob(name="", doc="element type of out_b [.., dim]")
    out: Float = knob(name="", doc="element type of the result [.., dim]")
    dim: int = knob(name="d{}", least=8, most=512, doc="elements of a row, a multiple of 8")
    family: Literal["attention_merge"] = knob(default="attention_merge", doc="the kernel family")

    @property
    def row_bytes(self) -> int:
        """Bytes that are moved for one row: three results and three log-sum-exps."""
        moved = sum(element(name).bytes for name in (self.a, self.b, self.out))
        return self.dim * moved + 3 * 4


@frozen
class AttentionMergeSchedule:
    """How it is computed: a row is shared by some threads of a warp."""

    threads: Literal[64, 128, 256, 512] = knob(name="{}x{}", doc="threads of a CTA")
    lanes: Literal[1, 2, 4, 8, 16, 32] = knob(
        name="",
        auto=True,
        doc="threads of a warp that share a row, 8 elements each at a time; auto: as many as "
        "the row has groups of 8, at most 32",
    )

    @property
    def tile(self) -> tuple[int]:
        """Rows of one block."""
        return (self.threads // self.lanes,)


AttentionMergeSpec = KernelSpec[AttentionMergeOperation, AttentionMergeSchedule]


# ---- The shape of a problem ----------------------------------------------------------------------

Steps = tuple[int, int, int]  # elements from one row to the next, along each of three dimensions


@dataclass(frozen=True, slots=True, order=True)
class AttentionMergeShape(Shape):
    """Rows: of all batches and heads."""

    rows: int


@dataclass(frozen=True, slots=True)
class AttentionMergeProblem:
    """The extents of one call, and where its rows lie.

    extents   three of them, whose product is the rows; leading ones are 1 where there are fewer
    steps     of each tensor along these: out_a, out_b, out, and of their log-sum-exps
    """

    extents: Steps
    steps_a: Steps
    steps_b: Steps
    steps_out: Steps
    steps_lse_a: Steps
    steps_lse_b: Steps
    steps_lse: Steps

    @property
    def rows(self) -> int:
        """Of all three dimensions."""
        first, second, third = self.extents
        return first * second * third


# ---- What is legal -------------------------------------------------------------------------------

MOST_VECTORS = 4  # of a thread: it holds those of two rows, 64 registers
LANES = 32  # of a warp


def operation_reasons(operation: AttentionMergeOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    return rules.broken([rules.multiple_of("dim", operation.dim, VALUES)])


def schedule_reasons(
    arch: Architecture, operation: AttentionMergeOperation, schedule: AttentionMergeSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    if vectors(operation, schedule) <= MOST_VECTORS:
        return []
    least = -(-operation.dim // VALUES // MOST_VECTORS)
    return [f"lanes {schedule.lanes} of dim {operation.dim}: must be at least {least}"]


def vectors(operation: AttentionMergeOperation, schedule: AttentionMergeSchedule) -> int:
    """How many vectors of a row a thread has, at most."""
    return -(-operation.dim // (VALUES * schedule.lanes))


def complete(
    arch: str, operation: AttentionMergeOperation, fields: Mapping[str, Any]
) -> AttentionMergeSchedule:
    """`lanes: auto`: as many as a row has vectors, rounded up; at most a warp."""
    given = {name: value for name, value in fields.items() if value != "auto"}
    lanes = min(LANES, 1 << (-(-operation.dim // VALUES) - 1).bit_length())
    return AttentionMergeSchedule(**{"lanes": lanes, **given})

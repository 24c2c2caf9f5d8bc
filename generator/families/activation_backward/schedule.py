"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import Float
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec

Differentiated = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]

VALUES = 8  # of a row, that a thread has: 16 bytes of 16-bit types


@frozen
class ActivationBackwardOperation:
    """What is computed: dz = dy * f'(z), and the sums of its columns (a bias gradient). Arithmetic
    is fp32.
    """

    dy: Float = knob(name="{}|{}_{}_{}", doc="element type of dy [m, n]")
    z: Float = knob(name="", doc="element type of z [m, n], the input of f")
    dz: Float = knob(name="", doc="element type of dz [m, n]")
    function: Differentiated = knob(
        doc="f, as in the epilogue step `activation` of gemm; none: dz is dy, and only the "
        "sums are written"
    )
    sums: bool = knob(default=False, doc="also write the sums of the columns of dz, in fp32")
    family: Literal["activation_backward"] = knob(
        default="activation_backward", doc="the kernel family"
    )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The matrices that are read and written, in the order of a launch's addresses."""
        return ("dy",) if self.function == "none" else ("dy", "z", "dz")

    @property
    def row_bytes(self) -> int:
        """Bytes of one column's elements in one row, over all matrices."""
        return sum(element(getattr(self, name)).bytes for name in self.tensors)


@frozen
class ActivationBackwardSchedule:
    """How it is computed: a CTA computes some columns of a part of the rows, from top to bottom."""

    threads: Literal[128, 256, 512] = knob(name="{}x{}", doc="threads of a CTA")
    columns: Literal[64, 128, 256, 512] = knob(
        name="",
        doc="columns of a CTA; each thread has 8 of them, and threads of the same columns "
        "divide the rows",
    )
    rows: Literal[1, 2, 4] = knob(
        default=2, name="rows{}", doc="rows that a thread loads before it computes the first one"
    )
    ctas_per_sm: Literal[1, 2, 4, 8] = knob(
        stored_as="blocks",
        default=4,
        name="blocks{}",
        doc="CTAs that run on an SM at the same time; the rows are divided into so many parts that "
        "about as many CTAs result",
    )

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns that a block works on at a time."""
        return self.threads * VALUES // self.columns * self.rows, self.columns


ActivationBackwardSpec = KernelSpec[ActivationBackwardOperation, ActivationBackwardSchedule]


# ---- The shape of a problem ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class ActivationBackwardShape(Shape):
    """m rows of n columns: all leading dimensions of dy are rows."""

    m: int
    n: int


@dataclass(frozen=True, slots=True)
class ActivationBackwardProblem:
    """The extents of one call, and the elements from row to row of each matrix that it has."""

    m: int
    n: int
    pitch_dy: int
    pitch_z: int = 0
    pitch_dz: int = 0


# ---- What is legal -------------------------------------------------------------------------------

MOST_THREADS = 2048  # of a multiprocessor (CUDA C++ Programming Guide, compute capability 9.0)
REGISTERS = 65_536  # of a multiprocessor
BESIDE = 24  # registers of addresses, of one row's arithmetic; fitted: none of the space spills


def operation_reasons(operation: ActivationBackwardOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    if operation.function != "none":
        return []
    found = []
    if not operation.sums:
        found.append("function none without sums: must be with sums, as it has no other result")
    others = {operation.z, operation.dz}
    if others != {operation.dy}:
        told = f"z {operation.z} and dz {operation.dz} of function none"
        found.append(f"{told}: must be {operation.dy} as dy is, for there is only dy")
    return found


def schedule_reasons(
    arch: Architecture,
    operation: ActivationBackwardOperation,
    schedule: ActivationBackwardSchedule,
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    resident = schedule.threads * schedule.ctas_per_sm
    if resident > MOST_THREADS:
        return [
            f"ctas_per_sm {schedule.ctas_per_sm} of {schedule.threads} threads: a multiprocessor "
            f"has room for {MOST_THREADS} threads"
        ]
    read = operation.tensors[:2]  # dz is written
    bits = sum(element(getattr(operation, name)).bits for name in read)
    registers = schedule.rows * VALUES * bits // 32 + VALUES * operation.sums + BESIDE
    return rules.broken([rules.fits_registers(registers, REGISTERS // resident)])

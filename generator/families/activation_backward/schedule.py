"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.epilogue import Float
from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

Differentiated = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]

VALUES = 8  # of a row, that a thread has: 16 bytes of 16-bit types


@frozen
class ActivationBackwardOperation:
    """What is computed: dz = dy * f'(z), and the sums of its columns. Arithmetic is fp32."""

    dy: Float = knob(name="{}|{}_{}_{}", doc="element type of dy [m, n]")
    z: Float = knob(name="", doc="element type of z [m, n], what f was applied to")
    dz: Float = knob(name="", doc="element type of dz [m, n]")
    function: Differentiated = knob(
        doc="f, as the step `activation` of gemm has it; none: dz is dy, and only sums are written"
    )
    sums: bool = knob(default=False, doc="the sums of the columns of dz, in fp32, are written too")
    family: Literal["activation_backward"] = knob(
        default="activation_backward", doc="which kernels these are"
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
    """How it is computed: a block has some columns of a part of the rows, from top to bottom."""

    threads: Literal[128, 256, 512] = knob(name="{}x{}", doc="of one block")
    columns: Literal[64, 128, 256, 512] = knob(
        name="", doc="of one block; each thread has 8 of them in every so many rows"
    )
    rows: Literal[1, 2, 4] = knob(
        default=2, name="rows{}", doc="that a thread reads before it computes the first"
    )
    ctas_per_sm: Literal[1, 2, 4, 8] = knob(
        stored_as="blocks",
        default=4,
        name="blocks{}",
        doc="that a multiprocessor has at a time: rows are cut into as many parts as that takes",
    )

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns that a block works on at a time."""
        return self.threads * VALUES // self.columns * self.rows, self.columns


ActivationBackwardSpec = KernelSpec[ActivationBackwardOperation, ActivationBackwardSchedule]

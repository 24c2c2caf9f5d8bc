"""The epilogue algebra: an ordered tuple of steps between the accumulators and D.

This is the one table of steps. A step is a frozen dataclass here and a C++ part of the same name
under templates/parts/epilogue/; nothing else knows a step by name. A part works on a fragment of
two rows by two columns in logical coordinates, so it does not depend on which side of wgmma is m.
"""

# ruff: noqa: D102 (the steps' properties are those that Step documents)

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from warploom.generator.elements import element
from warploom.generator.parameters import Field, Kind
from warploom.generator.rules import Reason, one_of

Function = Literal["relu", "gelu", "gelu_tanh", "silu"]
By = Literal["host", "device", "row", "column"]


class Step:
    """What every step declares.

    `auxiliary` names extra outputs (a pre-activation, an amax) and `columns_per_output` how many
    accumulator columns make one column of D (2 for gated steps); no shipped step uses them yet.
    """

    auxiliary: ClassVar[tuple[str, ...]] = ()
    columns_per_output: ClassVar[int] = 1

    @property
    def reads(self) -> Literal["nothing", "row", "fragment"]:
        """What the C++ part loads: per row of the tile, per fragment, or nothing."""
        return "nothing"

    @property
    def token(self) -> str:
        """The step in a kernel's name."""
        raise NotImplementedError

    def registers(self, *, paired: bool) -> int:
        """32-bit registers that what is loaded for one fragment takes, read in pairs or not."""
        return 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The files under templates/parts/epilogue/ that define the step's C++ class."""
        raise NotImplementedError

    @property
    def cpp(self) -> str:
        """The C++ class, with its element type where it has one."""
        raise NotImplementedError

    def fields(self, index: int) -> tuple[Field, ...]:
        """The step's entries in the parameter block, in the order of the C++ constructor."""
        return ()


@dataclass(frozen=True, slots=True)
class Scale(Step):
    """Multiply by a scalar (from the host, or read on the device) or a vector over rows/columns.

    Vectors and device scalars are fp32.
    """

    by: By
    step: Literal["scale"] = "scale"

    @property
    def token(self) -> str:
        return f"scale_{self.by}"

    @property
    def reads(self) -> Literal["nothing", "row", "fragment"]:
        return {"row": "row", "column": "fragment"}.get(self.by, "nothing")  # type: ignore[return-value]

    def registers(self, *, paired: bool) -> int:
        return 2 if self.by == "column" else 0

    @property
    def parts(self) -> tuple[str, ...]:
        return (f"scale_{self.by}.cuh",)

    @property
    def cpp(self) -> str:
        return f"Scale{self.by.title()}"

    def fields(self, index: int) -> tuple[Field, ...]:
        kind = Kind.FLOAT if self.by == "host" else Kind.POINTER
        extent = {"host": "", "device": "[1]", "row": "[m]", "column": "[n]"}[self.by]
        return (Field(f"scale_{index}", kind, "float", f"scale{extent}"),)


@dataclass(frozen=True, slots=True)
class Bias(Step):
    """Add a vector over the columns of D."""

    element: Literal["fp16", "bf16", "fp32"]
    step: Literal["bias"] = "bias"

    @property
    def token(self) -> str:
        return f"bias_{self.element}"

    @property
    def reads(self) -> Literal["nothing", "row", "fragment"]:
        return "fragment"

    def registers(self, *, paired: bool) -> int:
        return 2 * element(self.element).bits // 32 if paired else 2

    @property
    def parts(self) -> tuple[str, ...]:
        return ("bias.cuh",)

    @property
    def cpp(self) -> str:
        return f"Bias<{element(self.element).cpp}>"

    def fields(self, index: int) -> tuple[Field, ...]:
        return (Field(f"bias_{index}", Kind.POINTER, element(self.element).cpp, "bias[n]"),)


@dataclass(frozen=True, slots=True)
class Activation(Step):
    """Apply a function to each element; NaN stays NaN."""

    function: Function
    step: Literal["activation"] = "activation"

    @property
    def token(self) -> str:
        return self.function

    @property
    def parts(self) -> tuple[str, ...]:
        shared = ("logistic.cuh",) if self.function in ("gelu_tanh", "silu") else ()
        return (*shared, f"{self.function}.cuh")

    @property
    def cpp(self) -> str:
        return "".join(word.title() for word in self.function.split("_"))


@dataclass(frozen=True, slots=True)
class Residual(Step):
    """Add beta * C, a row-major [m, n] matrix that may be D itself; beta = 0 never reads C."""

    element: Literal["fp16", "bf16", "fp32"]
    step: Literal["residual"] = "residual"

    @property
    def token(self) -> str:
        return f"residual_{self.element}"

    @property
    def reads(self) -> Literal["nothing", "row", "fragment"]:
        return "fragment"

    def registers(self, *, paired: bool) -> int:
        return 4 * element(self.element).bits // 32 if paired else 4

    @property
    def parts(self) -> tuple[str, ...]:
        return ("residual.cuh",)

    @property
    def cpp(self) -> str:
        return f"Residual<{element(self.element).cpp}>"

    def fields(self, index: int) -> tuple[Field, ...]:
        return (
            Field(f"residual_{index}", Kind.POINTER, element(self.element).cpp, "C[m][pitch]"),
            Field(f"residual_{index}_pitch", Kind.INT64, "int64_t", "elements between rows of C"),
            Field(f"residual_{index}_beta", Kind.FLOAT, "float", "C is not read when this is 0"),
        )


EpilogueStep = Scale | Bias | Activation | Residual

STEPS: tuple[EpilogueStep, ...] = (
    *(Scale(by) for by in ("host", "device", "row", "column")),
    *(Bias(name) for name in ("fp16", "bf16", "fp32")),
    *(Activation(name) for name in ("relu", "gelu", "gelu_tanh", "silu")),
    *(Residual(name) for name in ("fp16", "bf16", "fp32")),
)
"""Every step there is; kernel names are parsed by matching their tokens."""


def legal(steps: tuple[EpilogueStep, ...]) -> Reason:
    """Every step is one of STEPS, and at most 8 of them follow each other."""
    if len(steps) > 8:
        return f"epilogue of {len(steps)} steps: at most 8"
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        return one_of("epilogue step", unknown[0].token, [step.token for step in STEPS])
    return None

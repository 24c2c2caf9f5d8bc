"""The epilogue algebra: an ordered tuple of steps between the accumulators and D.

This is the one table of steps. A step is a frozen dataclass here and a C++ part of the same name
under templates/gemm/epilogue/; nothing else knows a step by name. A part works on a fragment of
two rows by two columns in logical coordinates, so it does not depend on which side of wgmma is m.
"""

# ruff: noqa: D102 (the steps' properties are those that Step documents)

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from warploom.generator import names
from warploom.generator.elements import element
from warploom.generator.knob import frozen, knob
from warploom.generator.parameters import Field, int64, pointer, scalar
from warploom.generator.rules import Reason, one_of

Function = Literal["relu", "gelu", "gelu_tanh", "silu"]
By = Literal["host", "device", "row", "column"]
Reads = Literal["nothing", "row", "column", "fragment", "place"]


class Pitches(Protocol):
    """What a launch knows of steps, by their index: how what they read lies, in elements."""

    def pitch(self, step: int) -> int:
        """From row to row."""
        ...

    def batch_pitch(self, step: int) -> int:
        """From batch to batch."""
        ...


class Step:
    """What every step declares.

    `auxiliary` is true of a step with an output of its own, finished after the last tile.
    """

    auxiliary: ClassVar[bool] = False

    @property
    def reads(self) -> Reads:
        """What the C++ part loads: by row of D, by column, by both (`fragment`), or nothing; or
        that it asks for the `place` in D of what it is given.
        """
        return "nothing"

    @property
    def token(self) -> str:
        """The step in a kernel's name."""
        return names.short(self)

    def registers(self, *, paired: bool) -> int:
        """32-bit registers that what is loaded for one fragment takes, read in pairs or not."""
        return 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The files under templates/gemm/epilogue/ that define the step's C++ class."""
        raise NotImplementedError

    @property
    def cpp(self) -> str:
        """The C++ class, with its element type where it has one."""
        raise NotImplementedError

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        """The step's entries in the parameter block, in the order of the C++ constructor."""
        return ()

    def batch_field(self, index: int) -> Field[Pitches] | None:
        """Where D has batches: the distance between those of what the step reads of them."""
        if self.reads in ("nothing", "place"):
            return None
        name = self.fields(index)[0].name
        meaning = f"elements between batches of {name}"
        return int64(f"{name}_batch", meaning, lambda at: at.batch_pitch(index))


@frozen
class Scale(Step):
    """Multiply by a scalar (from the host, or read on the device) or a vector over rows/columns.

    Vectors and device scalars are fp32.
    """

    by: By = knob(
        name="scale_{}",
        doc="host: a number of the call; device: a tensor of one element; row, column: of [M], "
        "of [N]",
    )
    step: Literal["scale"] = "scale"

    @property
    def reads(self) -> Reads:
        return self.by if self.by in ("row", "column") else "nothing"

    def registers(self, *, paired: bool) -> int:
        return 0 if self.reads == "nothing" else 2

    @property
    def parts(self) -> tuple[str, ...]:
        return (f"scale_{self.by}.cuh",)

    @property
    def cpp(self) -> str:
        return f"Scale{self.by.title()}"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"scale_{index}"
        if self.by == "host":
            return (scalar(name, "scale"),)
        extent = {"device": "1", "row": "m", "column": "n"}[self.by]
        return (pointer(name, "float", f"scale[{extent}]"),)


@frozen
class Bias(Step):
    """Add a vector over the columns of D."""

    element: Literal["fp16", "bf16", "fp32"] = knob(name="bias_{}", doc="its element type")
    step: Literal["bias"] = "bias"

    @property
    def reads(self) -> Reads:
        return "column"

    def registers(self, *, paired: bool) -> int:
        return 2 * element(self.element).bits // 32 if paired else 2

    @property
    def parts(self) -> tuple[str, ...]:
        return ("bias.cuh",)

    @property
    def cpp(self) -> str:
        return f"Bias<{element(self.element).cpp}>"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        return (pointer(f"bias_{index}", element(self.element).cpp, "bias[n]"),)


@frozen
class Activation(Step):
    """Apply a function to each element; NaN stays NaN."""

    function: Function = knob(
        doc="gelu is the exact one, by erf; gelu_tanh its usual approximation"
    )
    step: Literal["activation"] = "activation"

    @property
    def parts(self) -> tuple[str, ...]:
        shared = ("logistic.cuh",) if self.function in ("gelu_tanh", "silu") else ()
        return (*shared, f"{self.function}.cuh")

    @property
    def cpp(self) -> str:
        return "".join(word.title() for word in self.function.split("_"))


@frozen
class Residual(Step):
    """Add beta * C, a row-major [m, n] matrix that may be D itself; beta = 0 never reads C."""

    element: Literal["fp16", "bf16", "fp32"] = knob(name="residual_{}", doc="the element type of C")
    step: Literal["residual"] = "residual"

    @property
    def reads(self) -> Reads:
        return "fragment"

    def registers(self, *, paired: bool) -> int:
        return 4 * element(self.element).bits // 32 if paired else 4

    @property
    def parts(self) -> tuple[str, ...]:
        return ("residual.cuh",)

    @property
    def cpp(self) -> str:
        return f"Residual<{element(self.element).cpp}>"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"residual_{index}"
        return (
            pointer(name, element(self.element).cpp, "C[m][pitch]"),
            int64(f"{name}_pitch", "elements between rows of C", lambda at: at.pitch(index)),
            scalar(f"{name}_beta", "C is not read when this is 0"),
        )


@frozen
class Amax(Step):
    """Raise an fp32 scalar to the largest magnitude that passes here; the values pass unchanged.

    It starts from what the scalar holds, so that several calls may share one. NaN wins over every
    number. Placed before the scale of an 8-bit output, it is what the next scale is chosen by.
    """

    step: Literal["amax"] = "amax"
    auxiliary: ClassVar[bool] = True

    @property
    def token(self) -> str:
        return "amax"

    @property
    def reads(self) -> Reads:
        return "place"

    def registers(self, *, paired: bool) -> int:
        return 2

    @property
    def parts(self) -> tuple[str, ...]:
        return ("amax.cuh",)

    @property
    def cpp(self) -> str:
        return "Amax"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        return (pointer(f"amax_{index}", "float", "amax[1]"),)


EpilogueStep = Scale | Bias | Activation | Residual | Amax

STEPS: tuple[EpilogueStep, ...] = (
    *(Scale(by) for by in ("host", "device", "row", "column")),
    *(Bias(name) for name in ("fp16", "bf16", "fp32")),
    *(Activation(name) for name in ("relu", "gelu", "gelu_tanh", "silu")),
    *(Residual(name) for name in ("fp16", "bf16", "fp32")),
    Amax(),
)
"""Every step there is."""


def legal(steps: tuple[EpilogueStep, ...]) -> Reason:
    """Every step is one of STEPS; at most 6 follow each other, so that names fit file systems."""
    if len(steps) > 6:
        return f"epilogue of {len(steps)} steps: at most 6"
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        return one_of("epilogue step", unknown[0].token, [step.token for step in STEPS])
    return None

"""The epilogue algebra: an ordered tuple of steps between the accumulators and D.

This is the one table of steps. A step is a frozen dataclass here, a C++ part of the same name under
templates/gemm/epilogue/, and a class in runtime/families/gemm/steps/ that knows torch's tensors;
nothing else knows a step by name. A part works on a fragment of two rows by two columns in logical
coordinates, so it does not depend on which side of wgmma is m.
"""

# ruff: noqa: D102 (the steps' properties are those that Step documents)

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, get_args

from warploom.generator import names
from warploom.generator.elements import Element, element
from warploom.generator.knob import every, frozen, knob
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

    step        its tag in YAML, and what its C++ part is called where there is one for all of it
    arguments   the words by which a call's items ask for it, see runtime/families/gemm/steps
    auxiliary   it has an output of its own, finished after the last tile
    results     the element types that D may have where it is among the steps; none: any
    """

    step: str
    arguments: ClassVar[tuple[str, ...]]
    auxiliary: ClassVar[bool] = False
    results: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> Reads:
        """What the C++ part loads: by row of D, by column, by both (`fragment`), or nothing; or
        that it asks for the `place` in D of what it is given.
        """
        return "nothing"

    @property
    def pitched(self) -> bool:
        """True where a launch tells the distance from row to row of what it reads."""
        return self.reads == "fragment"

    @property
    def token(self) -> str:
        """The step in a kernel's name."""
        return names.short(self) or self.step

    def columns(self, n: int) -> int:
        """Columns that are left of the n that it is given: a gated step would halve them."""
        return n

    def moved(self, rows: int, columns: int, d: Element) -> int:
        """Bytes of a tile of D that it moves, as the cost model counts them beside those of D."""
        return 0

    def registers(self, *, paired: bool) -> int:
        """32-bit registers that what is loaded for one fragment takes, read in pairs or not."""
        return 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The files under templates/gemm/epilogue/ that define the step's C++ class."""
        return (f"{self.step}.cuh",)

    @property
    def cpp(self) -> str:
        """The C++ class, with its element type where it has one."""
        return self.step.title()

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
    arguments: ClassVar[tuple[str, ...]] = (
        *("scale", "scale_a", "scale_b", "scale_d"),
        *("scale_row", "scale_column"),
    )

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
    arguments: ClassVar[tuple[str, ...]] = ("bias",)
    reads: ClassVar[Reads] = "column"

    def registers(self, *, paired: bool) -> int:
        return 2 * element(self.element).bits // 32 if paired else 2

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
    arguments: ClassVar[tuple[str, ...]] = ("activation",)

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
    arguments: ClassVar[tuple[str, ...]] = ("residual",)
    reads: ClassVar[Reads] = "fragment"

    def moved(self, rows: int, columns: int, d: Element) -> int:
        return rows * columns * d.bytes  # taken to be of D's type, as constants are fitted

    def registers(self, *, paired: bool) -> int:
        return 4 * element(self.element).bits // 32 if paired else 4

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
    arguments: ClassVar[tuple[str, ...]] = ("amax",)
    auxiliary: ClassVar[bool] = True
    reads: ClassVar[Reads] = "place"

    def registers(self, *, paired: bool) -> int:
        return 2

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        return (pointer(f"amax_{index}", "float", "amax[1]"),)


EpilogueStep = Scale | Bias | Activation | Residual | Amax

STEPS: tuple[EpilogueStep, ...] = tuple(
    step for kind in get_args(EpilogueStep) for step in every(kind)
)
"""Every step there is."""


def columns(steps: tuple[Step, ...], n: int) -> int:
    """The columns of D, where products have n."""
    for step in steps:
        n = step.columns(n)
    return n


def legal(steps: tuple[EpilogueStep, ...]) -> Reason:
    """Every step is one of STEPS; at most 6 follow each other, so that names fit file systems."""
    if len(steps) > 6:
        return f"epilogue of {len(steps)} steps: at most 6"
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        return one_of("epilogue step", unknown[0].token, [step.token for step in STEPS])
    return None

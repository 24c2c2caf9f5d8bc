"""The epilogue algebra: an ordered tuple of steps between the accumulators and D.

This is the one table of steps. A step is a frozen dataclass here, a C++ part of the same name under
templates/_product/epilogue/, and a class in runtime/families/_product/steps/ that knows torch's
tensors; nothing else knows a step by name. A part works on a fragment of two rows by two columns in
logical coordinates, so it does not depend on which side of wgmma is m.
"""

# ruff: noqa: D102 (the steps' properties are those that Step documents)

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Literal, get_args

from warploom.generator.elements import Element, element
from warploom.generator.knob import every, frozen, knob
from warploom.generator.parameters import Field, int64, pointer, scalar
from warploom.generator.rules import Reason, one_of
from warploom.generator.step import Pitches, Reads
from warploom.generator.step import Step as Step

Function = Literal["relu", "gelu", "gelu_tanh", "silu"]
GateFunction = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu_oai"]
GateLayout = Literal["halves", "interleaved"]
Float = Literal["fp16", "bf16", "fp32"]
By = Literal["host", "device", "row", "column"]


@frozen
class Scale(Step):
    """Multiply by a scalar, from the host or the device, or by a vector over rows or columns.

    Vectors and device scalars are fp32.
    """

    by: By = knob(
        name="scale_{}",
        doc="host: a number of the call; device: a tensor of one element; row: a vector [M]; "
        "column: a vector [N]",
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

    element: Float = knob(name="bias_{}", doc="element type of the vector")
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
        doc="gelu: the exact one, with erf; gelu_tanh: its usual approximation"
    )
    step: Literal["activation"] = "activation"
    arguments: ClassVar[tuple[str, ...]] = ("activation",)

    @property
    def parts(self) -> tuple[str, ...]:
        return (*_logistic(self.function), f"{self.function}.cuh")

    @property
    def cpp(self) -> str:
        return _class_name(self.function)


def derivative_parts(function: Function) -> tuple[str, ...]:
    """The files under templates/ that define the C++ class of a function's derivative."""
    return (*_logistic(function), f"_activation/{function}_gradient.cuh")


def function_parts(function: GateFunction, *, gradient: bool) -> tuple[str, ...]:
    """The files under templates/ that define the C++ class of a function, and its derivative's."""
    own = (*_logistic(function), f"_product/epilogue/{function}.cuh")
    return (*own, f"_activation/{function}_gradient.cuh") if gradient else own


def activation_class(function: Function) -> str:
    """What the C++ class of a function is called."""
    return _class_name(function)


def derivative_class(function: Function) -> str:
    """What that class is called."""
    return _class_name(f"{function}_gradient")


def _logistic(function: GateFunction) -> tuple[str, ...]:
    """The file of the logistic function, where a function and its derivative are made of it."""
    made_of_it = function in ("gelu_tanh", "silu", "swiglu_oai")
    return ("_activation/logistic.cuh",) if made_of_it else ()


def _class_name(words: str) -> str:
    return "".join(word.title() for word in words.split("_"))


@frozen
class Residual(Step):
    """Add beta * C, a row-major [m, n] matrix that may be D itself; if beta is 0, C is not read."""

    element: Float = knob(name="residual_{}", doc="element type of C")
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
    """Raise an fp32 scalar to the largest magnitude of the values, which are passed on unchanged.

    The scalar keeps its value if that is larger, so that several calls may share it. NaN wins
    over every number. Before the scale of an 8-bit output, this gives the number from which the
    next scale is chosen (delayed scaling).
    """

    step: Literal["amax"] = "amax"
    arguments: ClassVar[tuple[str, ...]] = ("amax",)
    auxiliary: ClassVar[bool] = True

    def registers(self, *, paired: bool) -> int:
        return 2

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        return (pointer(f"amax_{index}", "float", "amax[1]"),)


@frozen
class Preactivation(Step):
    """Store the values to z, a row-major [m, n] matrix, and pass them on unchanged."""

    element: Float = knob(name="preactivation_{}", doc="element type of z")
    step: Literal["preactivation"] = "preactivation"
    arguments: ClassVar[tuple[str, ...]] = ("preactivation",)
    auxiliary: ClassVar[bool] = True
    reads: ClassVar[Reads] = "fragment"

    def moved(self, rows: int, columns: int, d: Element) -> int:
        return rows * columns * element(self.element).bytes

    def registers(self, *, paired: bool) -> int:
        return 2

    @property
    def cpp(self) -> str:
        return f"Preactivation<{element(self.element).cpp}>"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"preactivation_{index}"
        return (
            pointer(name, element(self.element).cpp, "z[m][pitch]"),
            int64(f"{name}_pitch", "elements between rows of z", lambda at: at.pitch(index)),
        )


@frozen
class ActivationGradient(Step):
    """Multiply dy, a row-major [m, n] matrix, by a function's derivative at the values."""

    function: Function = knob(
        name="{}_gradient_{}", doc="the function whose derivative is taken; that of relu at 0 is 0"
    )
    element: Float = knob(name="", doc="element type of dy")
    step: Literal["activation_gradient"] = "activation_gradient"
    arguments: ClassVar[tuple[str, ...]] = tuple(
        f"{function}_gradient" for function in get_args(Function)
    )
    reads: ClassVar[Reads] = "fragment"

    def moved(self, rows: int, columns: int, d: Element) -> int:
        return rows * columns * element(self.element).bytes

    def registers(self, *, paired: bool) -> int:
        return 4 * element(self.element).bits // 32 if paired else 4

    @property
    def parts(self) -> tuple[str, ...]:
        return (*derivative_parts(self.function), "activation_gradient.cuh")

    @property
    def cpp(self) -> str:
        derivative = derivative_class(self.function)
        return f"ActivationGradient<{derivative}, {element(self.element).cpp}>"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"activation_gradient_{index}"
        return (
            pointer(name, element(self.element).cpp, "dy[m][pitch]"),
            int64(f"{name}_pitch", "elements between rows of dy", lambda at: at.pitch(index)),
        )


@frozen
class ColumnSum(Step):
    """Sum the values over the rows of D into an fp32 vector, as a bias gradient.

    The values are passed on unchanged. A vector [N] gets the sums over all batches, a vector
    with batch dimensions those of each batch.
    """

    step: Literal["column_sum"] = "column_sum"
    arguments: ClassVar[tuple[str, ...]] = ("column_sum",)
    auxiliary: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    reads: ClassVar[Reads] = "column"
    paired: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ("column_sum.cuh.jinja",)
    cpp: ClassVar[str] = "ColumnSum"

    def moved(self, rows: int, columns: int, d: Element) -> int:
        return rows * columns * 4 // 16  # what is stored of each 16 rows

    def registers(self, *, paired: bool) -> int:
        return 6

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        return (pointer(f"column_sum_{index}", "float", "sums[n]"),)


@frozen
class Gate(Step):
    """Multiply a function of one half of the columns (gate) by the other half (up).

    Steps before it apply to both halves, steps after it to the columns of D. swiglu_oai is
    (min(max(up, -7), 7) + 1) g / (1 + exp(-1.702 g)) with g = min(gate, 7), as in gpt-oss.
    """

    function: GateFunction = knob(name="gate_{}_{}", doc="the function of the gate")
    layout: GateLayout = knob(
        default="halves",
        name="",
        doc="halves: all gate columns, then all up columns; interleaved: gate and up columns "
        "alternate",
    )
    step: Literal["gate"] = "gate"
    arguments: ClassVar[tuple[str, ...]] = ("gate", "gate_interleaved")

    def columns(self, n: int) -> int:
        return n // 2

    @property
    def parts(self) -> tuple[str, ...]:
        return (*_logistic(self.function), f"{self.function}.cuh", "gate.cuh.jinja")

    @property
    def cpp(self) -> str:
        up = "SwigluOaiUp" if self.function == "swiglu_oai" else "Up"
        return f"Gate<{_class_name(self.function)}, {up}>"


@frozen
class SwigluGate(Step):
    """The gate swiglu_oai, with numbers of the call in place of 1.702 (alpha) and 7 (limit).

    (min(max(up, -limit), limit) + 1) g / (1 + exp(-alpha g)) with g = min(gate, limit).
    """

    layout: GateLayout = knob(default="halves", name="swiglu_gate_{}", doc="as that of the gate")
    function: ClassVar[GateFunction] = "swiglu_oai"
    step: Literal["swiglu_gate"] = "swiglu_gate"
    arguments: ClassVar[tuple[str, ...]] = ("swiglu_gate", "swiglu_gate_interleaved")
    parts: ClassVar[tuple[str, ...]] = ("_activation/logistic.cuh", "swiglu_gate.cuh.jinja")
    cpp: ClassVar[str] = "SwigluGate"

    def columns(self, n: int) -> int:
        return n // 2

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"swiglu_gate_{index}"
        return (
            scalar(f"{name}_alpha", "factor of the gate in its sigmoid"),
            scalar(f"{name}_limit", "bound of the gate, and of up on both sides"),
        )


GATES = (Gate, SwigluGate)
"""The steps that multiply a function of half of the columns by the other half."""


@frozen
class Quantize(Step):
    """Divide each block of 128 columns of a row by a scale, and store the scales in fp32.

    It must be the last step, with D in e4m3. A scale is the block's largest magnitude / 448, or
    1 if that is 0 or infinite.
    """

    scale: Literal["exact", "pow2"] = knob(
        name="quantize_{}",
        doc="exact: as computed; pow2: rounded up to a power of two, so that the division is exact",
    )
    step: Literal["quantize"] = "quantize"
    arguments: ClassVar[tuple[str, ...]] = ("quantize", "quantize_pow2")
    auxiliary: ClassVar[bool] = True
    pitched: ClassVar[bool] = True
    results: ClassVar[tuple[str, ...]] = ("e4m3",)

    def moved(self, rows: int, columns: int, d: Element) -> int:
        return rows * columns * 4 // BLOCK

    def registers(self, *, paired: bool) -> int:
        return 1

    @property
    def cpp(self) -> str:
        return f"Quantize<{'true' if self.scale == 'pow2' else 'false'}>"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"quantize_{index}"
        return (
            pointer(name, "float", "scales[n / 128][pitch]"),
            int64(f"{name}_pitch", "elements between blocks of a row", lambda at: at.pitch(index)),
        )


@frozen
class GateGradient(Step):
    """Compute a gate's input gradient from the gradient of its result, and the result again.

    The values are the gradient of the gate's result, [m, n]. z, a row-major [m, 2n] matrix, is
    the input of the gate, and its gradient is stored to dz, of the same shape and strides. The
    gate's result is passed on.
    """

    function: GateFunction = knob(name="{}_gate_gradient_{}_{}", doc="the function of the gate")
    element: Literal["fp16", "bf16"] = knob(name="", doc="element type of z and dz")
    layout: GateLayout = knob(
        default="halves",
        name="",
        doc="halves: all gate columns, then all up columns; interleaved: gate and up columns "
        "alternate",
    )
    step: Literal["gate_gradient"] = "gate_gradient"
    arguments: ClassVar[tuple[str, ...]] = tuple(
        f"{function}_gate_gradient{layout}"
        for layout in ("", "_interleaved")
        for function in get_args(GateFunction)
    )
    auxiliary: ClassVar[bool] = True
    loads: ClassVar[bool] = True
    reads: ClassVar[Reads] = "fragment"

    def moved(self, rows: int, columns: int, d: Element) -> int:
        return 2 * 2 * rows * columns * element(self.element).bytes

    def registers(self, *, paired: bool) -> int:
        return (4 if paired else 8) + 8 * (self.layout == "interleaved")

    @property
    def parts(self) -> tuple[str, ...]:
        functions = function_parts(self.function, gradient=True)
        up = ("up_factor.cuh",) if self.function != "swiglu_oai" else ()
        return (*functions, *up, f"gate_gradient_{self.layout}.cuh")

    @property
    def cpp(self) -> str:
        factor = "SwigluOaiFactor" if self.function == "swiglu_oai" else "UpFactor"
        names = (_class_name(self.function), _class_name(f"{self.function}_gradient"), factor)
        layout = _class_name(self.layout)
        return f"GateGradient{layout}<{', '.join(names)}, {element(self.element).cpp}>"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name, cpp = f"gate_gradient_{index}", element(self.element).cpp
        return (
            pointer(name, cpp, "z[m][pitch]"),
            pointer(f"{name}_dz", cpp, "dz[m][pitch]"),
            int64(f"{name}_pitch", "elements between rows of both", lambda at: at.pitch(index)),
        )


@frozen
class StochasticRounding(Step):
    """Round to one of the two neighbours in D's type at random, so that the mean is the value.

    It must be the last step. The random numbers are a function of a state in device memory and
    of the position in D.
    """

    step: Literal["stochastic_rounding"] = "stochastic_rounding"
    arguments: ClassVar[tuple[str, ...]] = ("stochastic_rounding",)
    results: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "e4m3", "e5m2")
    parts: ClassVar[tuple[str, ...]] = ("stochastic_rounding.cuh.jinja",)
    cpp: ClassVar[str] = "StochasticRounding"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        return (pointer(f"rounding_{index}", "const uint2", "[2]: seeds random numbers"),)


@frozen
class MeanSquare(Step):
    """Store what each group of 16 columns of D adds to the mean of squares of its row.

    It must be the last step. The sum over a row's groups is the mean of squares of the values
    before they are rounded to D's type. One warp sums each group in a fixed order, so that
    results are bitwise reproducible.
    """

    step: Literal["mean_square"] = "mean_square"
    arguments: ClassVar[tuple[str, ...]] = ("mean_square",)
    auxiliary: ClassVar[bool] = True
    pitched: ClassVar[bool] = True
    results: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")
    parts: ClassVar[tuple[str, ...]] = ("mean_square.cuh.jinja",)
    cpp: ClassVar[str] = "MeanSquare"

    def moved(self, rows: int, columns: int, d: Element) -> int:
        return rows * columns * 4 // GROUP

    def registers(self, *, paired: bool) -> int:
        return 2

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"mean_square_{index}"
        return (
            pointer(name, "float", "shares[m][pitch]"),
            int64(f"{name}_pitch", "elements between rows of shares", lambda at: at.pitch(index)),
        )


@frozen
class RmsScale(Step):
    """Divide each row by the root of the mean of squares of A's row, which `mean_square` stored.

    An earlier GEMM, whose result is A, stores it with that step. If the columns of this GEMM's
    weight are multiplied by the weight of an RMS norm, the result is that of the norm followed
    by the GEMM.
    """

    step: Literal["rms_scale"] = "rms_scale"
    arguments: ClassVar[tuple[str, ...]] = ("rms_scale",)
    pitched: ClassVar[bool] = True
    prepared: ClassVar[bool] = True
    cpp: ClassVar[str] = "RmsScale"

    def registers(self, *, paired: bool) -> int:
        return 2

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        name = f"rms_scale_{index}"
        return (
            pointer(name, "const float", "shares[m][pitch], one for each 16 of k"),
            int64(f"{name}_pitch", "elements between rows of shares", lambda at: at.pitch(index)),
            scalar(f"{name}_eps", "added to a mean of squares"),
        )


@frozen
class Scatter(Step):
    """Write row i of the result to row index[i] of D, as CUTLASS's ScatterD does.

    It must be the last step. Rows whose index is negative, or is not a row of D, are not written.
    """

    index: Literal["int32", "int64"] = knob(name="scatter_{}", doc="element type of the indices")
    step: Literal["scatter"] = "scatter"
    arguments: ClassVar[tuple[str, ...]] = ("scatter",)

    @property
    def cpp(self) -> str:
        return f"Scatter<{self._element}>"

    @property
    def _element(self) -> str:
        return "int" if self.index == "int32" else "int64_t"

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        kind = f"const {self._element}"
        return (pointer(f"scatter_{index}", kind, "index[m]: the row of D that each row is for"),)


EpilogueStep = (
    Scale
    | Bias
    | Activation
    | Residual
    | Amax
    | Preactivation
    | ActivationGradient
    | ColumnSum
    | Gate
    | Quantize
    | GateGradient
    | StochasticRounding
    | MeanSquare
    | RmsScale
    | SwigluGate
    | Scatter
)

STEPS: tuple[EpilogueStep, ...] = tuple(
    step for kind in get_args(EpilogueStep) for step in every(kind)
)
"""Every step there is."""


LAST = (Quantize, StochasticRounding, MeanSquare, Scatter)
"""The steps that can only be the last."""

BLOCK = 128
"""Columns of D that share a scale where a step quantizes them."""

GROUP = 16
"""Columns of D whose squares are summed: those of a warp, of whichever side of wgmma they are."""


MOST_STEPS = 8
"""Of one epilogue."""

MOST_CHARACTERS = 128
"""Of the tokens of an epilogue in a kernel's name, which is a file's."""


def columns(steps: tuple[Step, ...], n: int) -> int:
    """The columns of D, where products have n."""
    for step in steps:
        n = step.columns(n)
    return n


@lru_cache(maxsize=1024)  # every layout and many rules ask
def gate_of(steps: tuple[Step, ...]) -> Gate | SwigluGate | None:
    """The gate among the steps; None where there is none."""
    return next((step for step in steps if isinstance(step, GATES)), None)


@lru_cache(maxsize=1024)
def quantizes(steps: tuple[Step, ...]) -> bool:
    """Whether columns of D have scales of their own."""
    return bool(steps) and isinstance(steps[-1], Quantize)


@lru_cache(maxsize=1024)
def rounds_stochastically(steps: tuple[Step, ...]) -> bool:
    """Whether D is rounded at random."""
    return bool(steps) and isinstance(steps[-1], StochasticRounding)


@lru_cache(maxsize=1024)
def sums_squares(steps: tuple[Step, ...]) -> bool:
    """Whether the squares of D's rows are summed."""
    return bool(steps) and isinstance(steps[-1], MeanSquare)


@lru_cache(maxsize=1024)
def scatters(steps: tuple[Step, ...]) -> bool:
    """Whether rows of the result go to rows of D that indices name."""
    return bool(steps) and isinstance(steps[-1], Scatter)


def factors(steps: tuple[Step, ...], index: int) -> int:
    """How many columns of a step's there are for each column of D."""
    return 2 if any(isinstance(step, GATES) for step in steps[index:]) else 1


def legal(steps: tuple[EpilogueStep, ...]) -> Reason:
    """Every step is one of STEPS; so many follow each other that names fit file systems."""
    if len(steps) > MOST_STEPS:
        return f"epilogue of {len(steps)} steps: at most {MOST_STEPS}"
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        return one_of("epilogue step", unknown[0].token, [step.token for step in STEPS])
    gates = [step for step in steps if isinstance(step, GATES)]
    if len(gates) > 1:
        return f"epilogue with {gates[0].token} and {gates[1].token}: at most one gate"
    if gates and any(step.partial for step in steps):
        return f"epilogue with {gates[0].token} and column_sum: a gated epilogue sums no columns"
    scaled = [step for step in steps if isinstance(step, Quantize)]
    if scaled and rounds_stochastically(steps):
        return (
            f"epilogue with {scaled[0].token} and stochastic_rounding: must be one of them; "
            "warploom.cast rounds blocks with scales stochastically"
        )
    backward = [step for step in steps if isinstance(step, GateGradient)]
    if len(backward) > 1:
        return (
            f"epilogue with {backward[0].token} and {backward[1].token}: must be at most one "
            "gradient of a gate, as what passes on is that gate's result and no gradient"
        )
    if backward and (gates or quantizes(steps)):
        other = (*gates, steps[-1])[0]
        return (
            f"epilogue with {backward[0].token} and {other.token}: must be without the other, as "
            "D is of all columns, in 16 bits or more"
        )
    squares = [step for step in steps if isinstance(step, MeanSquare)]
    if squares and gates:
        return (
            f"epilogue with {gates[0].token} and {squares[0].token}: must be without the gate; sum "
            "squares in the epilogue of the product that adds the residual"
        )
    norms = [step for step in steps if isinstance(step, RmsScale)]
    if len(norms) > 1:
        return f"epilogue with {len(norms)} {norms[0].token}: at most one, as A has one norm"
    scattered = [step for step in steps if isinstance(step, Scatter)]
    alone = [step for step in steps if isinstance(step, LAST)]
    if scattered and len(alone) > len(scattered):
        other = next(step for step in alone if step not in scattered)
        return (
            f"epilogue with {other.token} and {scattered[0].token}: must be one of them, as each "
            "is the last step; write the rows to D[index] afterwards"
        )
    early = [step for step in steps[:-1] if isinstance(step, LAST)]
    if early:
        return f"epilogue with {early[0].token} before other steps: must be the last"
    written = "_".join(step.token for step in steps)
    if len(written) > MOST_CHARACTERS:
        return (
            f"epilogue {written} of {len(written)} characters: at most {MOST_CHARACTERS}, as names "
            "have it"
        )
    return None

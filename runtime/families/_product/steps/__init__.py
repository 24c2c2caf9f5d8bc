"""The steps of an epilogue with torch's tensors: one class for each of generator/epilogue.py.

An item of a call's epilogue is `(kind, value)`, and says its step by the kind:

    ("scale", x)            times x, a number or an fp32 tensor of one element
    ("scale_row", v)        times v, an fp32 vector with an element for each row of D
    ("scale_column", v)     times v, the same of columns
    ("bias", v)             plus v, an element for each column; fp16, bf16 or fp32
    ("activation", name)    relu, gelu, gelu_tanh or silu of it
    ("gate", name)          the function of the first half of the columns times the second half:
                            relu, gelu, gelu_tanh, silu or swiglu_oai; what follows is of half the
                            columns. ("gate_interleaved", name): of every other column, from the
                            first, times that after it
    ("swiglu_gate", alpha, limit)  swiglu_oai with numbers in place of 1.702 and 7; likewise
                            swiglu_gate_interleaved
    ("residual", c, beta)   plus beta c, c of D's shape; fp16, bf16 or fp32
    ("amax", t)             raises t, an fp32 tensor of one element, to the largest magnitude there
    ("preactivation", z)    stores values there in z, of D's shape; fp16, bf16 or fp32
    ("relu_gradient", dy)   dy times relu's derivative, dy of D's shape; fp16, bf16 or fp32;
                            likewise gelu_gradient, gelu_tanh_gradient and silu_gradient
    ("silu_gate_gradient", z, dz)  with values dh there, the gradient of what ("gate", "silu")
                            returns of z: fills dz with that of z and passes the gate's result on.
                            z and dz have twice D's columns, one type, fp16 or bf16, and the same
                            strides; likewise relu, gelu, gelu_tanh and swiglu_oai, and
                            silu_gate_gradient_interleaved of ("gate_interleaved", "silu")
    ("column_sum", s)       fills s, fp32, with the sums over the rows of values there: those of all
                            rows where s is [n], those of each batch where it has D's batches

    ("quantize", s)         last, of a D in e4m3: divides 128 columns of a row by the scale that
                            brings their largest magnitude to 448, and fills s, fp32 [m, n / 128]
                            with rows next to each other; ("quantize_pow2", s): by powers of two
    ("mean_square", s)      last: fills s, fp32 [m, n / 16], with what each 16 columns of D add to
                            the mean of squares of their row
    ("rms_scale", s, eps)   over the root of eps and the mean of squares of a's row, which is the
                            sum of its shares s, fp32 [m, k / 16], as ("mean_square", s) fills them
    ("scatter", i)          last: row r of the result goes to row i[r] of D, i int32 or int64 [m];
                            rows whose index is no row of D are not written
    ("stochastic_rounding", t)  last: D is one of the two neighbours at random, by Philox of t,
                            int64 [2]

The names of keywords are kinds too: `("scale_a", y)`, y being x or v, `("scale_b", y)` and
`("scale_d", x)`. A step that joins has a class in the generator, a line in STEPS, and a C++ part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from warploom.errors import ProblemError
from warploom.generator.epilogue import EpilogueStep
from warploom.runtime.families._product.steps.activation import (
    TorchActivation,
    TorchActivationGradient,
)
from warploom.runtime.families._product.steps.added import TorchBias, TorchResidual
from warploom.runtime.families._product.steps.gate import TorchGate, TorchSwigluGate
from warploom.runtime.families._product.steps.gate_gradient import TorchGateGradient
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.outputs import (
    TorchAmax,
    TorchColumnSum,
    TorchPreactivation,
)
from warploom.runtime.families._product.steps.quantize import TorchQuantize
from warploom.runtime.families._product.steps.rms import TorchMeanSquare, TorchRmsScale
from warploom.runtime.families._product.steps.scale import TorchScale
from warploom.runtime.families._product.steps.scatter import TorchScatter
from warploom.runtime.families._product.steps.step import Draws, Flat, Given, Item, TorchStep
from warploom.runtime.families._product.steps.stochastic_rounding import (
    TorchStochasticRounding,
)
from warploom.runtime.tensors import shown

STEPS: dict[str, TorchStep[Any]] = {
    "scale": TorchScale(),
    "bias": TorchBias(),
    "activation": TorchActivation(),
    "residual": TorchResidual(),
    "amax": TorchAmax(),
    "preactivation": TorchPreactivation(),
    "activation_gradient": TorchActivationGradient(),
    "column_sum": TorchColumnSum(),
    "gate": TorchGate(),
    "quantize": TorchQuantize(),
    "gate_gradient": TorchGateGradient(),
    "stochastic_rounding": TorchStochasticRounding(),
    "mean_square": TorchMeanSquare(),
    "rms_scale": TorchRmsScale(),
    "swiglu_gate": TorchSwigluGate(),
    "scatter": TorchScatter(),
}
"""Every step, by its word in the generator, which is its class's `step`."""


KINDS: dict[str, TorchStep[Any]] = {
    kind: one for one in STEPS.values() for kind in one.step.arguments
}
"""The step of each kind of item."""
OUTPUTS = frozenset(kind for kind, one in KINDS.items() if one.step.auxiliary)
"""The kinds of items whose last tensor is an output of its step."""
LOADING = frozenset(kind for kind, one in KINDS.items() if one.step.loads)
"""Those of them that have another tensor, which is read."""


def flatten(listed: Sequence[Item]) -> Flat:
    """What an operator is given of items."""
    flat = Flat()
    for item in listed:
        step_of(item).flatten(item, flat)
    return flat


def unflatten(words: Sequence[str], given: Given) -> list[Item]:
    """The items again; ProblemError for a word of no step."""
    return [_owner(word).unflatten(word, given) for word in words]


def columns(words: Sequence[str], n: int) -> int:
    """The columns of D where those of the product are n, of what an operator is given of items."""
    for word in words:
        n = _owner(word).columns(n)
    return n


def _owner(word: str) -> TorchStep[Any]:
    return next((one for one in STEPS.values() if one.owns(word)), None) or step_of((word,))


def step_of(item: Item) -> TorchStep[Any]:
    """What an item asks for; ProblemError for one of no kind, or of another length than its own."""
    listing = isinstance(item, tuple | list)
    kind = item[0] if listing and item else None
    one = KINDS.get(kind) if isinstance(kind, str) else None
    if one is not None and len(item) == 2 + bool(one.number):
        return one
    longer = [
        f"; a {word} is (kind, {one.value}, {one.number})"
        for word, one in STEPS.items()
        if one.number
    ]
    raise ProblemError(
        f"epilogue item {shown(item)}" + (f" of length {len(item)}" if listing else ""),
        rule=f"an item is (kind, value), the kind one of {', '.join(KINDS)}{''.join(longer)}",
        fix=f"for example {', '.join(one.example for one in STEPS.values() if one.example)}",
    )


def samples(steps: Sequence[EpilogueStep], draws: Draws, at: Extents) -> Iterator[Item]:
    """A random item for each step, in order, of an epilogue whose accumulators are `at`."""
    for step in steps:
        yield STEPS[step.step].sample(step, draws, at)
        at = replace(at, n=step.columns(at.n))

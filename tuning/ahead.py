"""Which kernels calls run on a GPU that may not be here, to build them ahead of time.

The calls are those that tuning times, on tensors without memory; what chooses for them is what
chooses for every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warploom.errors import ConfigurationError
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.records import problem_text
from warploom.generator.shapes import Shape
from warploom.generator.space import operations
from warploom.generator.specification import Operation
from warploom.runtime.decision import Choice
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention.problem import Call
from warploom.runtime.families._attention.samples import AttentionData
from warploom.runtime.families.attention_forward import plan as attention
from warploom.runtime.families.gemm import plan as gemm
from warploom.runtime.families.gemm.epilogue_operands import kind_of
from warploom.runtime.families.gemm.problem import Options
from warploom.runtime.families.gemm.samples import GemmData
from warploom.tuning.problems import shapes_of


@dataclass(frozen=True, slots=True)
class Chosen:
    """An operation at a shape, and the kernel that its calls run."""

    operation: Operation
    shape: Shape
    choice: Choice

    def __str__(self) -> str:
        """The operation and the shape, for people."""
        return problem_text(self.operation, self.shape)


def ahead(
    path: Path,
    target: DeviceLimits,
    shapes: Sequence[str] = (),
    *,
    model: str | None = None,
    rows: Sequence[int] = (),
) -> list[Chosen]:
    """Return what calls of every operation of a configuration run on a GPU, at every shape.

    Shapes are written and found as those of `problems` are; the configuration's schedules play no
    part. Raises ConfigurationError where no operation has a shape, and what `problems` raises.
    """
    found = [
        Chosen(operation, shape, choice)
        for operation in operations(path)
        for shape in shapes_of(operation, shapes, model, rows)
        for choice in choices(operation, shape, target)
    ]
    if not found:
        raise ConfigurationError(
            f"{path}: no shapes",
            rule="an operation must have cells in benchmarks/cells.yaml, or shapes that are given",
            fix="give --shapes",
        )
    return found


def choices(operation: Operation, shape: Shape, target: DeviceLimits) -> list[Choice]:
    """Return the kernels of calls of an operation at a shape whose tensors are dense.

    There is one, but where a vector of scales has one element: `warploom.gemm` takes that of a
    keyword for a number, that of an `epilogue` for a vector.
    """
    return _CHOICES[operation.family](operation, shape, target)


def _gemm(operation: GemmOperation, shape: GemmShape, target: DeviceLimits) -> list[Choice]:
    one = GemmData(operation, shape, "meta", 0).operands()
    options = Options(TORCH[operation.d], operation.accumulation)
    keywords = {"scale_row": "scale_a", "scale_column": "scale_b"}
    by_keywords = tuple((keywords.get(item[0], item[0]), *item[1:]) for item in one.listed)
    kinds = {tuple(map(kind_of, listed)): listed for listed in (by_keywords, one.listed)}
    return [gemm.draft(one.a, one.b, listed, None, options, target)[1] for listed in kinds.values()]


def _attention(
    operation: AttentionOperation, shape: AttentionShape, target: DeviceLimits
) -> list[Choice]:
    return [_forward(operation, shape, target).choice]


def _gradients(
    operation: AttentionBackwardOperation, shape: AttentionShape, target: DeviceLimits
) -> list[Choice]:
    asked = operation.deterministic, None
    return [attention.gradients_choice(_forward(operation, shape, target), asked, target)]


def _forward(
    operation: AttentionOperation | AttentionBackwardOperation,
    shape: AttentionShape,
    target: DeviceLimits,
) -> attention.Draft:
    data = AttentionData(operation, shape, "meta", 0)
    call = Call(data.queries(), data.keys(), data.keys(), **data.lengths(), **data.keywords)
    return attention.draft(call, target)


_CHOICES: dict[str, Callable[[Any, Any, DeviceLimits], list[Choice]]] = {
    "gemm": _gemm,
    "attention_forward": _attention,
    "attention_backward": _gradients,
}

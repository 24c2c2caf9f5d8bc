"""Which kernels calls run on a GPU that may not be here, to build them ahead of time.

The calls are those that tuning times, on tensors without memory, or those that a program made while
they were recorded; what chooses for them is what chooses for every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warploom.errors import ConfigurationError
from warploom.generator import families, models, rules
from warploom.generator.launches import DeviceLimits
from warploom.generator.shapes import Shape
from warploom.generator.space import operations
from warploom.generator.specification import Operation
from warploom.runtime.dispatch import Choice
from warploom.runtime.families import family
from warploom.tuning import calls
from warploom.tuning.calls import NONE, RecordedCall
from warploom.tuning.problems import shapes_of


@dataclass(frozen=True, slots=True)
class Chosen:
    """An operation at a shape, and the kernel that its calls run.

    shape   None of a recorded call that named its kernel
    """

    operation: Operation
    shape: Shape | None
    choice: Choice

    def __str__(self) -> str:
        """The operation and the shape, for people."""
        return calls.told(self.operation, self.shape)


def ahead(
    path: Path,
    target: DeviceLimits,
    shapes: Sequence[str] = (),
    *,
    model: str | None = None,
    rows: Sequence[int] = (),
    serving: bool = False,
) -> list[Chosen]:
    """Return what calls of every operation of a configuration run on a GPU, at every shape.

    Shapes are written and found as those of `problems` are; the configuration's schedules play no
    part. Operations of `serving` are those of the model, where that is the path of a config.json:
    in its type, of its heads. Raises ConfigurationError where no operation has a shape, and what
    `problems` raises.
    """
    found = [
        Chosen(operation, shape, choice)
        for operation in (_of_model(path, model) if serving else operations(path))
        for shape in shapes_of(operation, shapes, model, rows)
        for choice in family(operation.family).choices(operation, shape, target)
    ]
    if not found:
        raise ConfigurationError(
            f"{path}: no shapes",
            rule="an operation must have cases in benchmarks/cells.yaml, or shapes by --shapes",
            fix="pass --shapes",
        )
    return found


def _of_model(path: Path, model: str | None) -> list[Operation]:
    """The operations of a configuration as a model has them; those that no kernel has are left out.

    ConfigurationError where none is left.
    """
    listed = operations(path)
    if model is None or not models.is_path(model):
        return listed
    found: dict[Operation, None] = {}
    refused: list[str] = []
    for operation in listed:
        known = families.family(operation.family)
        for one in known.of_model(operation, models.read(model)):
            reasons = rules.fields(one) or known.operation_reasons(one)
            refused += reasons
            if not reasons:
                found[one] = None
    if not found:
        raise ConfigurationError(
            f"{model} for {listed[0].family}",
            rule="; ".join(dict.fromkeys(refused)),
            fix="record its calls with warploom.recording, and compile that file",
        )
    return list(found)


def recorded(path: Path, target: DeviceLimits) -> list[Chosen]:
    """Return what the calls that `warploom.recording` wrote run on a GPU.

    Raises ConfigurationError for a file that is none of these, or has no call.
    """
    listed: list[RecordedCall] = calls.read(path)
    if not listed:
        raise ConfigurationError(
            f"{path}: no calls",
            rule=f"must have a call: {NONE}",
            fix="run the model on a GPU inside of `with warploom.recording(...)`",
        )
    return [Chosen(one.operation, one.shape, one.choice(target)) for one in listed]

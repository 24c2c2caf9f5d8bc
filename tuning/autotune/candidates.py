"""Which kernels are worth measuring for a problem: the first of a space, as the model ranks them.

It loads no torch, since the process that compiles asks for it. Every candidate is a legal point of
a space that comes with the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from warploom.errors import SpecificationError
from warploom.generator.configurations import spaces
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import load, proposals, rank
from warploom.generator.shapes import Shape
from warploom.generator.space import points
from warploom.generator.specification import KernelSpec, Operation

COUNT = 10  # of the model's choices


def candidates(
    operation: Operation, shape: Shape, target: DeviceLimits, first: Iterable[KernelSpec] = ()
) -> list[KernelSpec]:
    """Return the kernels that come `first`, then the model's proposals for dense tensors."""
    table = family(operation.family).table
    requires = table.required(operation, shape)
    space: dict[KernelSpec, None] = {}
    for spec in _space(operation):  # type: ignore[arg-type]
        if spec.arch == target.arch and table.suits(spec.schedule, shape):
            with suppress(SpecificationError):  # what these tensors require is not legal for all
                fitted = table.fitted(spec.schedule, requires)
                space[KernelSpec(target.arch, operation, fitted)] = None
    ranked = rank(load(target.gpu), space, shape, target.multiprocessors)
    return list(dict.fromkeys([*first, *proposals(ranked, COUNT)]))


@cache
def _space(operation: Any) -> tuple[KernelSpec, ...]:  # noqa: ANN401 (operations are hashable)
    """Every legal point that the package's spaces have for an operation."""
    return tuple(spec for path in _files(operation.family) for spec in points(path, operation))


def _files(name: str) -> list[Path]:
    found = (path for paths in spaces().values() for path in paths)
    return list(dict.fromkeys(path for path in found if path.parent.name == name))

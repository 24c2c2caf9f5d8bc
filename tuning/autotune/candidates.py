"""Which kernels are worth measuring for a problem, beside those of the table: the first of a space.

The model ranks a space, and errs the most about what it ranks first: of a thousand points it takes
those that it is too kind to. What it was held against is the table's portfolio, whose first ones
therefore come before (tuning/problems.py). Among 94 sweeps of drawn products the best of its first
eight is 0.7 to 1.7 % behind the best known, with eight of the space 0 to 0.2 %; with ten of the
space alone, hardly one of which had been swept, nobody knows. What a family tailors to the shape no
space has: tiles as wide as one wave needs them, in larger clusters; the
model knows none of more than two blocks from measurements.

It loads no torch, since the process that compiles asks for it. Every candidate is legal.
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

COUNT = 8  # of the space,
TAILORED = 6  # and of what is tailored to the shape


def candidates(
    operation: Operation, shape: Shape, target: DeviceLimits, first: Iterable[KernelSpec] = ()
) -> list[KernelSpec]:
    """Return the kernels that come `first`, then the model's proposals beside them."""
    first = list(dict.fromkeys(first))
    table = family(operation.family).table
    requires = table.required(operation, shape)
    fitted = _fitted(operation, target.arch, requires)  # type: ignore[arg-type]
    space = [spec for spec in fitted if table.suits(spec.schedule, shape)]
    tailored = _tailored(operation, shape, target, requires)
    found = first
    for listed, count in ((space, COUNT), (tailored, TAILORED)):
        ranked = rank(load(target.gpu), listed, shape, target.multiprocessors)
        found = [*found, *proposals(ranked, count, beside=found)]
    return found


def _tailored(
    operation: Operation, shape: Shape, target: DeviceLimits, requires: object
) -> list[KernelSpec]:
    """What a family tailors to a shape, for such dense tensors."""
    known = family(operation.family)
    found = []
    for schedule in known.tailored(operation, shape, target):
        with suppress(SpecificationError):  # what these tensors require is not legal for all
            fitted = known.table.fitted(schedule, requires)
            found.append(KernelSpec(target.arch, operation, fitted))
    return found


@cache
def _fitted(operation: Any, arch: str, requires: Any) -> tuple[KernelSpec, ...]:  # noqa: ANN401 (what is hashable)
    """Every legal point that the package's spaces have for an operation on such dense tensors."""
    table = family(operation.family).table
    found: dict[KernelSpec, None] = {}
    for spec in (spec for path in _files(operation.family) for spec in points(path, operation)):
        if spec.arch == arch:
            with suppress(SpecificationError):  # what these tensors require is not legal for all
                fitted = table.fitted(spec.schedule, requires)
                found[KernelSpec(arch, operation, fitted)] = None
    return tuple(found)


def _files(name: str) -> list[Path]:
    found = (path for paths in spaces().values() for path in paths)
    return list(dict.fromkeys(path for path in found if path.parent.name == name))

"""The kernels of a family's table: those of a row, and all that the model chooses among."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from warploom.errors import SpecificationError
from warploom.generator.families import family
from warploom.generator.families.table import Row
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation


def legal(
    operation: Operation, shape: Shape, arch: str, requires: object = None
) -> Iterator[KernelSpec]:
    """Every kernel of the table that an operation can have, as its tensors require it."""
    for row in family(operation.family).table.portfolio(operation, shape):
        with suppress(SpecificationError):
            yield listed(row, operation, shape, arch, requires)


def listed(
    row: Row, operation: Operation, shape: Shape, arch: str, requires: object = None
) -> KernelSpec:
    """The kernel of a row of the table for a legal operation, in the first way that is legal.

    SpecificationError where none is.
    """
    described = family(operation.family)
    refusal: SpecificationError | None = None
    for fields in described.table.fields(row, operation, shape, requires):
        try:
            return KernelSpec.of_legal(arch, operation, described.complete(arch, operation, fields))
        except SpecificationError as error:
            refusal = error
    raise refusal or SpecificationError(f"{row}")

"""Random operands of a GEMM, as calls of an operation at a shape have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.generator.epilogue import columns
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.samples import items
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Item
from warploom.runtime.trial import generator, wrong


@dataclass(frozen=True, slots=True)
class Operands:
    """One set of buffers: a, b, the items of the epilogue, and the output."""

    a: torch.Tensor
    b: torch.Tensor
    listed: tuple[Item, ...]
    out: torch.Tensor


class GemmData:
    """Floats are normal, int8 uniform, scales in [0.5, 1.5); on `meta`, only shapes and strides."""

    def __init__(self, operation: GemmOperation, shape: GemmShape, device: str, seed: int) -> None:
        self.operation, self.shape, self.device = operation, shape, device
        self._batches = (shape.batches,) * operation.batched
        self._draws = Draws(device, generator(device, seed))

    def operands(self) -> Operands:
        """Draw one set, with an output full of what no right result is full of."""
        operation, shape = self.operation, self.shape
        a = self._matrix(operation.a, shape.m, shape.k, across=operation.layout_a == "col")
        b = self._matrix(operation.b, shape.k, shape.n, across=operation.layout_b == "col")
        at = Extents(self._batches, shape.m, shape.n)
        extents = (*self._batches, shape.m, columns(operation.epilogue, shape.n))
        out = torch.empty(extents, dtype=TORCH[operation.d], device=self.device)
        return Operands(a, b, tuple(items(operation.epilogue, self._draws, at)), wrong(out))

    def _matrix(self, element: str, rows: int, columns: int, *, across: bool) -> torch.Tensor:
        """A matrix of so many rows and columns, column by column in memory if `across`."""
        extents = (columns, rows) if across else (rows, columns)
        found = self._draws.values(element, (*self._batches, *extents))
        return found.mT if across else found

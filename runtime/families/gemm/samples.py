"""Random operands of a GEMM, as calls of an operation at a shape have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warploom.generator.epilogue import Activation, Amax, Bias, EpilogueStep, Residual, Scale
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.runtime.elements import TORCH
from warploom.runtime.families.gemm.epilogue import Item
from warploom.runtime.trial import generator


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
        self._random = generator(device, seed)

    def operands(self) -> Operands:
        """Draw one set, with an output full of what no right result is full of."""
        operation, shape = self.operation, self.shape
        a = self._matrix(operation.a, shape.m, shape.k, across=operation.layout_a == "col")
        b = self._matrix(operation.b, shape.k, shape.n, across=operation.layout_b == "col")
        extents = (shape.batches,) * operation.batched + (shape.m, shape.n)
        out = torch.empty(extents, dtype=TORCH[operation.d], device=self.device)
        return Operands(a, b, tuple(map(self._item, operation.epilogue)), wrong(out))

    def _matrix(self, element: str, rows: int, columns: int, *, across: bool) -> torch.Tensor:
        """A matrix of so many rows and columns, column by column in memory if `across`."""
        extents = (columns, rows) if across else (rows, columns)
        batches = (self.shape.batches,) * self.operation.batched
        found = self._values(element, (*batches, *extents))
        return found.mT if across else found

    def _values(self, element: str, extents: Sequence[int]) -> torch.Tensor:
        size, source = torch.Size(extents), self._random
        if element == "int8":
            return torch.randint(
                -127, 128, size, generator=source, dtype=torch.int8, device=self.device
            )
        return torch.randn(size, generator=source, device=self.device).to(TORCH[element])

    def _item(self, step: EpilogueStep) -> Item:
        m, n = self.shape.m, self.shape.n
        match step:
            case Scale():
                if step.by == "host":
                    return ("scale", 0.75)
                extents = {"device": 1, "row": m, "column": n}[step.by]
                kind = {"device": "scale"}.get(step.by, f"scale_{step.by}")
                drawn = torch.rand(extents, generator=self._random, device=self.device)
                return (kind, drawn + 0.5)
            case Bias():
                return ("bias", self._values(step.element, (n,)))
            case Activation():
                return ("activation", step.function)
            case Residual():
                batches = (self.shape.batches,) * self.operation.batched
                return ("residual", self._values(step.element, (*batches, m, n)), 1.0)
            case Amax():
                return ("amax", torch.zeros(1, device=self.device))


def wrong(out: torch.Tensor) -> torch.Tensor:
    """A tensor like `out`, full of what no right result is full of."""
    if out.dtype.is_floating_point:
        return torch.full(out.shape, math.nan, device=out.device).to(out.dtype)
    return torch.full_like(out, torch.iinfo(out.dtype).min)

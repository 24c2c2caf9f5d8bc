"""Random operands of a GEMM, calls of its kernels, and their check against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from warploom.generator.epilogue import Activation, Amax, Bias, EpilogueStep, Residual, Scale
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.model.shapes import GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import api, reference
from warploom.runtime.elements import TORCH
from warploom.runtime.epilogue import Item
from warploom.runtime.measure import Call, largest_share
from warploom.tuning.trial import sets_for


@dataclass(frozen=True, slots=True)
class Operands:
    """One set of buffers: a, b, the items of the epilogue, and the output."""

    a: torch.Tensor
    b: torch.Tensor
    listed: tuple[Item, ...]
    out: torch.Tensor


class GemmTrial:
    """A GEMM on random data: floats are normal, int8 uniform, scales in [0.5, 1.5)."""

    def __init__(self, operation: GemmOperation, shape: GemmShape, device: str, seed: int) -> None:
        self.operation, self.shape, self.device = operation, shape, device
        self._random = torch.Generator(device).manual_seed(seed)
        one = self._operands()
        moved = sum(t.numel() * t.element_size() for t in (one.a, one.b, one.out))
        more = sets_for(moved, device) - 1
        self.sets = [one, *(self._operands() for _ in range(more))]

    def calls(self, spec: KernelSpec) -> list[Call]:
        """One call of `spec` for each set of operands."""
        return [
            partial(
                api.gemm,
                one.a,
                one.b,
                out=one.out,
                epilogue=one.listed,
                accumulation=self.operation.accumulation,
                spec=spec,
            )
            for one in self.sets
        ]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        self.sets[0].out.copy_(_wrong(self.sets[0].out))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        exact, bound = self._expected
        return largest_share(self.sets[0].out.reshape(exact.shape), exact, bound)

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.sets[0]
        return reference.gemm_bound(
            one.a, one.b, one.listed, one.out.dtype, self.operation.accumulation
        )

    def _operands(self) -> Operands:
        operation, shape = self.operation, self.shape
        a = self._matrix(operation.a, shape.m, shape.k, across=operation.layout_a == "col")
        b = self._matrix(operation.b, shape.k, shape.n, across=operation.layout_b == "col")
        extents = (shape.batches,) * operation.batched + (shape.m, shape.n)
        out = torch.empty(extents, dtype=TORCH[operation.d], device=self.device)
        return Operands(a, b, tuple(map(self._item, operation.epilogue)), _wrong(out))

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


def _wrong(out: torch.Tensor) -> torch.Tensor:
    """A tensor like `out`, full of what no right result is full of."""
    if out.dtype.is_floating_point:
        return torch.full(out.shape, math.nan, device=out.device).to(out.dtype)
    return torch.full_like(out, torch.iinfo(out.dtype).min)

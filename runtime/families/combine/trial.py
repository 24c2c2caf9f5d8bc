"""Calls on random operands, and what their results are."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from warploom.generator.families.combine import CombineOperation, CombineShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.elements import TORCH
from warploom.runtime.families.combine import reference
from warploom.runtime.families.combine.call import CombineCall, PermuteCall
from warploom.runtime.plan import run
from warploom.runtime.sampled import Bound
from warploom.runtime.trial import generator, sets_for, wrong


def draw(
    operation: CombineOperation,
    shape: CombineShape,
    device: str,
    random: torch.Generator | None,
) -> CombineCall | PermuteCall:
    """A call with normal operands, whose results have their places; on `meta`, undrawn."""
    tokens, k, columns = shape.tokens, shape.k, shape.columns
    dtype = TORCH[operation.values]

    def drawn(*extents: int, name: str = operation.values) -> torch.Tensor:
        return torch.randn(extents, generator=random, device=device).to(TORCH[name])

    weights = None if operation.weights == "none" else drawn(tokens, k, name=operation.weights)
    order = torch.randperm(tokens * k, generator=random, device=device)
    inverse = order.int().reshape(tokens, k)
    if operation.direction == "combine":
        call = CombineCall(drawn(tokens * k, columns), inverse, weights)
        call.out = wrong(torch.empty(tokens, columns, dtype=dtype, device=device))
        return call
    combined = drawn(tokens * k, columns) if operation.dot else None
    made = PermuteCall(drawn(tokens, columns), inverse, weights, combined)
    made.out = wrong(torch.empty(tokens * k, columns, dtype=dtype, device=device))
    if operation.dot and weights is not None:
        made.gradient_out = wrong(torch.empty_like(weights))
    return made


def results(call: CombineCall | PermuteCall) -> list[torch.Tensor]:
    """The results that a call has its places for."""
    made = [call.out] if isinstance(call, CombineCall) else [call.out, call.gradient_out]
    return [one for one in made if one is not None]


def bounds(call: CombineCall | PermuteCall) -> list[Bound]:
    """What the results are in float64, and how far off those of a kernel may be."""
    if isinstance(call, CombineCall):
        return [reference.sum_bound(call.rows, call.inverse, call.weights)]
    found = [reference.row_bound(call.hidden, call.inverse, call.weights, call.row_count)]
    if call.combined is not None and call.weights is not None:
        given = call.hidden, call.inverse, call.combined, call.weights.dtype
        found.append(reference.dot_bound(*given))
    return found


class CombineTrial:
    """Calls whose results are held against float64."""

    def __init__(
        self, operation: CombineOperation, shape: CombineShape, device: str, seed: int
    ) -> None:
        random = generator(device, seed)
        moved = shape.tokens * (1 + shape.k * (1 + operation.dot)) * shape.columns
        sets = sets_for(moved * operation.bytes, device)
        self.sets = [draw(operation, shape, device, random) for _ in range(sets)]

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of operands."""
        made: list[Any] = [replace(one, spec=spec) for one in self.sets]
        return [partial(run, one) for one in made]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        for one in self.results:
            one.copy_(wrong(one))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        return share(self.results, self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """What the first set has of results."""
        return results(self.sets[0])

    @cached_property
    def _expected(self) -> list[Bound]:
        return bounds(self.sets[0])


def share(found: list[torch.Tensor], expected: list[Bound]) -> float:
    """The largest error of each result, as a share of its bound."""
    return max(measure.largest_share(one, *held) for one, held in zip(found, expected, strict=True))

"""Calls on random operands, and what both of their results are."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch

from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.elements import TORCH
from warploom.runtime.families.activation_backward import reference
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.plan import run
from warploom.runtime.sampled import Bound
from warploom.runtime.trial import generator, sets_for, wrong


def draw(
    operation: ActivationBackwardOperation,
    shape: ActivationBackwardShape,
    device: str,
    random: torch.Generator | None,
) -> ActivationBackwardCall:
    """A call with normal operands, whose results have their places; on `meta`, undrawn."""

    def drawn(name: str) -> torch.Tensor:
        made = torch.randn(shape.m, shape.n, generator=random, device=device)
        return made.to(TORCH[name])

    call = ActivationBackwardCall(drawn(operation.dy), sums=operation.sums)
    if operation.sums:
        call.sums_out = wrong(torch.empty(shape.n, device=device))
    if operation.function != "none":
        call.z, call.activation = drawn(operation.z), operation.function
        call.out = wrong(torch.empty_like(call.dy, dtype=TORCH[operation.dz]))
    return call


def bounds(call: ActivationBackwardCall) -> tuple[Bound, Bound]:
    """What dz and its sums are in float64, and how far off those of a kernel may be."""
    dtype = call.dy.dtype if call.out is None else call.out.dtype
    return reference.bounds(call.dy, call.z, call.activation, dtype)


class ActivationBackwardTrial:
    """Calls of which both results are held against float64, where there are two."""

    def __init__(
        self,
        operation: ActivationBackwardOperation,
        shape: ActivationBackwardShape,
        device: str,
        seed: int,
    ) -> None:
        random = generator(device, seed)
        sets = sets_for(shape.m * shape.n * operation.row_bytes, device)
        self.sets = [draw(operation, shape, device, random) for _ in range(sets)]

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of operands."""
        return [partial(run, replace(one, spec=spec)) for one in self.sets]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        for one in (self.sets[0].out, self.sets[0].sums_out):
            if one is not None:
                one.copy_(wrong(one))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        results = self.sets[0].out, self.sets[0].sums_out
        return share(results, self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """What the first set has of dz and its sums."""
        return [one for one in (self.sets[0].out, self.sets[0].sums_out) if one is not None]

    @cached_property
    def _expected(self) -> tuple[Bound, Bound]:
        return bounds(self.sets[0])


def share(
    results: tuple[torch.Tensor | None, torch.Tensor | None], expected: tuple[Bound, Bound]
) -> float:
    """The largest error of dz and of the sums, where they are, as a share of its bound."""
    return max(
        measure.largest_share(one, *held)
        for one, held in zip(results, expected, strict=True)
        if one is not None
    )

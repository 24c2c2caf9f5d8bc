"""Calls on random operands, and what their results are."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch

from warploom.generator.families.cast import CastOperation, CastShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.elements import TORCH
from warploom.runtime.families.cast.call import CastCall, Details
from warploom.runtime.families.cast.reference import Results
from warploom.runtime.plan import run
from warploom.runtime.trial import generator, sets_for, wrong


def draw(
    operation: CastOperation, shape: CastShape, device: str, random: torch.Generator | None
) -> CastCall:
    """A call with normal operands, whose results have their places; on `meta`, undrawn."""

    def drawn(columns: int) -> torch.Tensor:
        values = torch.randn(shape.m, columns, generator=random, device=device)
        return values.to(TORCH[operation.x])

    is_gate, gradient = operation.gate != "none", None
    x = drawn(2 * shape.n if is_gate and not operation.gradient else shape.n)
    if operation.gradient:
        gradient = drawn(shape.n // 2)
    call = CastCall(
        x,
        TORCH[operation.q],
        operation.block,
        operation.transpose,
        pow2=operation.pow2,
        rounding=operation.rounding,
        gate=operation.gate if is_gate else None,
        gradient=gradient,
    )
    if operation.static:
        (_, scale, _, _) = call.results(Details(()))
        assert scale is not None  # noqa: S101 (as none was given)
        call.scale = scale.fill_(2.0**-6)
    if operation.rounding == "stochastic":
        call.rounding_state = torch.arange(2, device=device)
    if operation.amax:
        call.amax = torch.zeros(1, device=device)
    call.out, call.scale_out, call.out_t, call.scale_t_out = call.results(Details(()))
    return call


def results_of(call: CastCall) -> Results:
    """What a call writes, where it was told where."""
    return call.out, call.scale_out, call.out_t, call.scale_t_out


def expected(call: CastCall) -> Results:
    """What the results are, by plain torch operations on the same device."""
    blank = replace(
        call, out=None, scale_out=None, out_t=None, scale_t_out=None, amax=None, spec=None
    )
    details = Details(())
    made = blank.results(details)
    blank.compute(details, made)
    return made


def share(results: Results, right: Results) -> float:
    """0 where all bits are right, else more than 1: how many numbers differ, and one more."""
    wrong_bits = 0
    for one, other in zip(results, right, strict=True):
        if one is None or other is None:
            continue
        integer = torch.uint8 if one.dtype.itemsize == 1 else torch.int32
        differ = one.view(integer) != other.view(integer)
        if one.dtype.is_floating_point:  # NaN is as good as any other
            differ &= ~(one.float().isnan() & other.float().isnan())
        wrong_bits += int(differ.sum())
    return float(wrong_bits + 1 if wrong_bits else 0)


class CastTrial:
    """Calls of which all results are held against plain torch operations."""

    def __init__(self, operation: CastOperation, shape: CastShape, device: str, seed: int) -> None:
        random = generator(device, seed)
        sets = sets_for(shape.m * shape.n * operation.value_bytes, device)
        self.sets = [draw(operation, shape, device, random) for _ in range(sets)]

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of operands."""
        return [partial(run, replace(one, spec=spec)) for one in self.sets]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        for one in self.results:
            one.copy_(wrong(one))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        return share(results_of(self.sets[0]), self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """What the first set has of q and scales, of x and of x.T."""
        return [one for one in results_of(self.sets[0]) if one is not None]

    @cached_property
    def _expected(self) -> Results:
        return expected(self.sets[0])

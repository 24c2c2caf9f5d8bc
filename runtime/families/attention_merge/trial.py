"""Calls on random operands, and what both of their results are."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch

from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_merge import reference
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.plan import run
from warploom.runtime.sampled import Bound
from warploom.runtime.trial import generator, sets_for, wrong


def draw(
    operation: AttentionMergeOperation,
    shape: AttentionMergeShape,
    device: str,
    random: torch.Generator | None,
) -> AttentionMergeCall:
    """A call with normal operands, whose results have their places; on `meta`, undrawn."""

    def drawn(*extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=random, device=device)

    a, b = (drawn(shape.rows, operation.dim).to(TORCH[name]) for name in (operation.a, operation.b))
    out = wrong(torch.empty_like(a, dtype=TORCH[operation.out]))
    lse_a, lse_b = 3 * drawn(shape.rows), 3 * drawn(shape.rows)
    return AttentionMergeCall(a, lse_a, b, lse_b, out, wrong(lse_a))


def bounds(call: AttentionMergeCall) -> tuple[Bound, Bound]:
    """What both results are in float64, and how far off those of a kernel may be."""
    dtype = call.out_a.dtype if call.out is None else call.out.dtype
    return reference.bounds(call.out_a, call.lse_a, call.out_b, call.lse_b, dtype)


class AttentionMergeTrial:
    """Calls of which both results are held against float64."""

    def __init__(
        self,
        operation: AttentionMergeOperation,
        shape: AttentionMergeShape,
        device: str,
        seed: int,
    ) -> None:
        random = generator(device, seed)
        sets = sets_for(shape.rows * operation.row_bytes, device)
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
        return share(self.results, self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """What the first set has of out and lse."""
        return [one for one in (self.sets[0].out, self.sets[0].lse) if one is not None]

    @cached_property
    def _expected(self) -> tuple[Bound, Bound]:
        return bounds(self.sets[0])


def share(
    results: list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor], expected: tuple[Bound, Bound]
) -> float:
    """The largest error of out and of lse, as a share of its bound."""
    return max(
        measure.largest_share(one, *held) for one, held in zip(results, expected, strict=True)
    )

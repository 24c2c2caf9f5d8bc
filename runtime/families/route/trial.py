"""Calls on random ids, and what their results are."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch

from warploom.generator.families.route import RouteOperation, RouteShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.families.route import reference
from warploom.runtime.families.route.call import Details, RouteCall
from warploom.runtime.families.route.reference import Results
from warploom.runtime.plan import run
from warploom.runtime.trial import generator, sets_for

_BYTES = 16  # of a pair: its id, and two results


def draw(
    operation: RouteOperation, shape: RouteShape, device: str, random: torch.Generator | None
) -> RouteCall:
    """A call with uniform ids, whose results have their places; on `meta`, undrawn."""
    ids = torch.randint(
        0, shape.experts, (shape.tokens, shape.k), generator=random, device=device
    ).to(getattr(torch, operation.ids))
    call = RouteCall(ids, shape.experts)
    call.offsets, call.order, call.inverse = (
        one.fill_(-7) if not one.is_meta else one for one in call.results(Details())
    )
    return call


class RouteTrial:
    """Calls of which each number has to be right."""

    def __init__(
        self, operation: RouteOperation, shape: RouteShape, device: str, seed: int
    ) -> None:
        random = generator(device, seed)
        sets = sets_for(shape.tokens * shape.k * _BYTES, device)
        self.sets = [draw(operation, shape, device, random) for _ in range(sets)]

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of ids."""
        return [partial(run, replace(one, spec=spec)) for one in self.sets]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set; return 0 where all is right, and infinity elsewhere."""
        for one in self.results:
            one.fill_(-7)
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """Whether what the first set holds is right: 0, else infinity."""
        return share(self.results, self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """What the first set has of the three results."""
        one = self.sets[0]
        return [made for made in (one.offsets, one.order, one.inverse) if made is not None]

    @cached_property
    def _expected(self) -> Results:
        one = self.sets[0]
        return reference.route(one.ids, one.experts, one.first)


def share(results: list[torch.Tensor] | Results, expected: Results) -> float:
    """0 where all results are as expected, else infinity."""
    right = all(torch.equal(one, held) for one, held in zip(results, expected, strict=True))
    return 0.0 if right else float("inf")

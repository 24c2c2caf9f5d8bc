"""Routing, as measuring and building ahead of time ask for it."""

from __future__ import annotations

import math
from functools import partial

import torch

from warploom.generator.families.route import RouteOperation, RouteShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.families.route import reference
from warploom.runtime.families.route.api import route
from warploom.runtime.families.route.call import Details, RouteCall
from warploom.runtime.sampled import CallTrial, Results, SampledFamily
from warploom.runtime.trial import wrong


class RouteRuntime(SampledFamily[RouteOperation, RouteShape]):
    """Calls of `route`."""

    function = staticmethod(route)
    operands = 1
    called = RouteCall

    def draw(
        self,
        operation: RouteOperation,
        shape: RouteShape,
        device: str,
        random: torch.Generator | None,
    ) -> RouteCall:
        """A call with uniform ids, whose results have their places; on `meta`, undrawn."""
        ids = torch.randint(
            0, shape.experts, (shape.tokens, shape.k), generator=random, device=device
        ).to(getattr(torch, operation.ids))
        call = RouteCall(ids, shape.experts)
        call.offsets, call.order, call.inverse = map(wrong, call.results(Details()))
        return call

    def expected(self, call: RouteCall) -> Results:
        """What the results are, by plain torch operations on the same device."""
        return reference.route(call.ids, call.experts, call.first)

    def share(self, results: Results, expected: Results) -> float:
        """0 where all results are as expected, else infinity."""
        both = zip(results, expected, strict=True)
        right = all(one is not None and torch.equal(one, held) for one, held in both)  # type: ignore[arg-type]
        return 0.0 if right else math.inf

    def baselines(self, operation: RouteOperation, trial: CallTrial) -> list[Baseline]:
        """torch's sort and what follows it, eager and compiled."""
        given = [(one.ids, one.experts, one.first) for one in trial.sets]
        return eager_and_compiled(partial(reference.route), given)


FAMILY = RouteRuntime()

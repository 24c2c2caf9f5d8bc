"""Routing, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from warploom.generator.families.route import RouteOperation, RouteShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.families.route import reference
from warploom.runtime.families.route.api import route
from warploom.runtime.families.route.call import RouteCall
from warploom.runtime.families.route.trial import RouteTrial, draw
from warploom.runtime.family import RuntimeFamily


class RouteRuntime(RuntimeFamily[RouteOperation, RouteShape]):
    """Calls of `route`."""

    function = staticmethod(route)
    operands = 1

    def call(self, *operands: Any, **keywords: Any) -> RouteCall:
        """The call that `route` makes, for `explain`."""
        return RouteCall(*operands, **keywords)

    def trial(
        self, operation: RouteOperation, shape: RouteShape, device: str, seed: int
    ) -> RouteTrial:
        """Random calls: see trial.py."""
        return RouteTrial(operation, shape, device, seed)

    def calls(self, operation: RouteOperation, shape: RouteShape) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]

    def baselines(self, operation: RouteOperation, trial: RouteTrial) -> list[Baseline]:
        """torch's sort and what follows it, eager and compiled."""
        given = [(one.ids, one.experts, one.first) for one in trial.sets]
        return eager_and_compiled(partial(reference.route), given)


FAMILY = RouteRuntime()

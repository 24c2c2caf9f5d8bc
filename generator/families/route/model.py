"""How long a call takes: its launch, and what its warps do one pair after the other."""

from __future__ import annotations

from warploom.generator.families.route.schedule import WARP, RouteOperation, RouteSchedule
from warploom.generator.families.route.shape import RouteShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 3e-6,  # seconds
    "cluster": 1e-6,  # seconds that CTAs of a cluster wait for each other
    "pairs": 1.5e-7,  # seconds of an SM for as many pairs as a warp has threads, of 32 warps
    "experts": 2e-8,  # seconds of a warp for the counts of its threads
}


def seconds(
    constants: Value,
    operation: RouteOperation,
    schedule: RouteSchedule,
    shape: RouteShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    pairs = shape.tokens * shape.k / (schedule.cluster * schedule.threads)
    counts = (shape.experts / schedule.threads + 1) * schedule.threads / WARP
    apart = constants["cluster"] * (schedule.cluster > 1)
    own = pairs * schedule.threads / 1024 * constants["pairs"]
    return constants["launch"] + apart + own + counts * constants["experts"]

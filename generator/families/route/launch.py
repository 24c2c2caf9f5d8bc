"""A call's only launch: one cluster, whatever the call is, and its time."""

from __future__ import annotations

from warploom.generator import launches as data
from warploom.generator.families.route.schedule import (
    PAIRS,
    WARP,
    RouteLayout,
    RouteOperation,
    RouteProblem,
    RouteSchedule,
    RouteShape,
    RouteSpec,
)
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import refuse_beyond

AtLaunch = data.AtLaunch[RouteOperation, RouteSchedule, RouteProblem]


def parameters(spec: RouteSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: ids, the three results, and extents."""
    fields: list[Field[AtLaunch]] = [
        pointer("ids", f"const {spec.operation.cpp}", "[tokens][k]: experts of each token"),
        pointer("offsets", "int32_t", "[experts]: the end of the rows of each"),
        pointer("order", "int32_t", "[pairs]: the pair that each row is of"),
        pointer("inverse", "int32_t", "[pairs]: the row of each pair; -1 of skipped ones"),
        int64("token_step", "elements of ids from token to token", lambda at: at.problem.steps[0]),
        int64("choice_step", "from choice to choice", lambda at: at.problem.steps[1]),
        int64("first", "the id of the first expert", lambda at: at.problem.first),
        int32("pairs", "of a token and an expert", lambda at: at.problem.pairs),
        int32("choices", "of a token: k", lambda at: at.problem.k),
        int32("experts", "of which there are rows", lambda at: at.problem.experts),
        int32("bits", "of the number of experts", lambda at: at.problem.experts.bit_length()),
        int32("slice", "pairs of a warp", lambda at: _slice(at.spec, at.problem)),
    ]
    return block(fields)


def _slice(spec: RouteSpec, problem: RouteProblem) -> int:
    """The pairs of a warp: whole loads of all its threads."""
    warps = spec.schedule.warps * spec.schedule.cluster
    return -(-problem.pairs // (warps * WARP)) * WARP


def launches(spec: RouteSpec, problem: RouteProblem, device: DeviceLimits) -> list[Launch]:
    """One launch. There must be pairs; ProblemError for more than 32 bits count."""
    schedule = spec.schedule
    warps = schedule.warps * schedule.cluster
    reached = warps * _slice(spec, problem) + WARP * PAIRS
    refuse_beyond({f"tokens {problem.tokens}, k {problem.k}": reached})
    values = parameters(spec).values(data.AtLaunch(spec, problem, device))
    return [
        Launch(
            spec.name,
            schedule.cluster,
            schedule.threads,
            schedule.cluster,
            RouteLayout(schedule).bytes_for(problem.experts),
            values,
            early=True,
        )
    ]


# ---- How long a call takes -----------------------------------------------------------------------

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

"""A call's only launch: how many blocks, and what each of its parameters holds."""

from __future__ import annotations

from warploom.generator.families.axpy.schedule import AxpyOperation, AxpySchedule, AxpySpec
from warploom.generator.families.axpy.shape import AxpyShape
from warploom.generator.launches import AtLaunch, DeviceLimits, Launch
from warploom.generator.parameters import ParameterBlock, block, int64, pointer, scalar
from warploom.generator.shapes import refuse_beyond

At = AtLaunch[AxpyOperation, AxpySchedule, AxpyShape]


def parameters(spec: AxpySpec) -> ParameterBlock[At]:
    """The parameter block: three vectors, their length and a factor."""
    cpp = spec.operation.type.cpp
    return block(
        [
            pointer("x", f"const {cpp}", "[n]"),
            pointer("y", f"const {cpp}", "[n]"),
            pointer("d", cpp, "[n]"),
            int64("n", "elements", lambda at: at.problem.n),
            scalar("alpha", "of x"),
        ]
    )


def launches(spec: AxpySpec, problem: AxpyShape, device: DeviceLimits) -> list[Launch]:
    """One launch, with a block for each tile; ProblemError for more than a grid has."""
    (tile,) = spec.schedule.tile
    blocks = -(-problem.n // tile)
    refuse_beyond({f"n {problem.n}": blocks})
    return [
        Launch(
            entry=spec.name,
            grid=blocks,
            block=spec.schedule.threads,
            cluster=1,
            shared_bytes=0,
            parameters=parameters(spec).values(AtLaunch(spec, problem, device)),
            early=True,
        )
    ]

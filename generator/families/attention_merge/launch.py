"""A call's only launch: blocks of rows, where these lie, and its time."""

from __future__ import annotations

from collections.abc import Callable

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.attention_merge.schedule import (
    AttentionMergeOperation,
    AttentionMergeProblem,
    AttentionMergeSchedule,
    AttentionMergeShape,
    AttentionMergeSpec,
)
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import refuse_beyond

AtLaunch = data.AtLaunch[AttentionMergeOperation, AttentionMergeSchedule, AttentionMergeProblem]

TENSORS = ("a", "b", "out", "lse_a", "lse_b", "lse")


def parameters(spec: AttentionMergeSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: three results, three log-sum-exps, and the steps along each."""
    fields: list[Field[AtLaunch]] = []
    for name in TENSORS:
        single = name.startswith("lse")
        cpp = "float" if single else element(getattr(spec.operation, name)).cpp
        written = name in ("out", "lse")
        shape = "[rows]" if single else "[rows][dim]"
        fields.append(pointer(name, cpp if written else f"const {cpp}", shape))
        for axis in range(3):
            told = f"elements of {name} from row to row, dimension {axis}"
            fields.append(int64(f"{name}_step{axis}", told, _step(name, axis)))
    fields += [
        int32("rows", "of all dimensions", lambda at: at.problem.rows),
        int32("extent1", "rows of dimension 1", lambda at: at.problem.extents[1]),
        int32("extent2", "rows of dimension 2", lambda at: at.problem.extents[2]),
    ]
    return block(fields)


def _step(name: str, axis: int) -> Callable[[AtLaunch], int]:
    return lambda at: int(getattr(at.problem, f"steps_{name}")[axis])


def launches(
    spec: AttentionMergeSpec, problem: AttentionMergeProblem, device: DeviceLimits
) -> list[Launch]:
    """One launch. There must be rows; ProblemError for more than 32 bits count."""
    (rows,) = spec.schedule.tile
    blocks = -(-problem.rows // rows)
    refuse_beyond({f"rows {problem.rows}": blocks * rows})
    values = parameters(spec).values(data.AtLaunch(spec, problem, device))
    return [Launch(spec.name, blocks, spec.schedule.threads, 1, 0, values, early=True)]


# ---- How long a call takes -----------------------------------------------------------------------

START = {
    "launch": 2e-6,  # seconds
    "bandwidth": 4e12,  # bytes a second of memory
    "block": 2e-8,  # seconds of a multiprocessor for a block
}


def seconds(
    constants: Value,
    operation: AttentionMergeOperation,
    schedule: AttentionMergeSchedule,
    shape: AttentionMergeShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    traffic = shape.rows * operation.row_bytes / constants["bandwidth"]
    blocks = shape.rows * schedule.lanes / schedule.threads / multiprocessors
    return constants["launch"] + max(traffic, blocks * constants["block"])

"""A call's only launch: CTAs of columns of tokens, or of rows, where these lie, and its time."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.combine.schedule import (
    VALUES,
    CombineOperation,
    CombineProblem,
    CombineSchedule,
    CombineShape,
    CombineSpec,
)
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import refuse_beyond

_WARP = 32  # threads


@dataclass(frozen=True)
class AtLaunch(data.AtLaunch[CombineOperation, CombineSchedule, CombineProblem]):
    """What the parameters of a launch are functions of."""

    @property
    def chunks(self) -> int:
        """The CTAs of a token, each with other columns."""
        return -(-self.problem.columns // (self.schedule.threads * VALUES))

    @property
    def grid(self) -> int:
        """CTAs: of columns of tokens, or of one row for each warp."""
        if self.operation.direction == "combine":
            return self.problem.tokens * self.chunks
        return -(-self.problem.tokens * self.problem.k // (self.schedule.threads // _WARP))


def parameters(spec: CombineSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: tokens, rows, where rows are, weights, and extents."""
    operation, cpp = spec.operation, element(spec.operation.values).cpp
    combines = operation.direction == "combine"
    fields: list[Field[AtLaunch]] = [
        pointer("tokens", cpp if combines else f"const {cpp}", "[count][tokens_pitch]"),
        pointer("rows", f"const {cpp}" if combines else cpp, "[row_count][rows_pitch]"),
        pointer("inverse", "const int32_t", "[count][choices]: the row of each pair, or -1"),
        int64("tokens_pitch", "elements between tokens", lambda at: at.problem.tokens_pitch),
        int64("rows_pitch", "elements between rows", lambda at: at.problem.rows_pitch),
        int32("count", "of tokens", lambda at: at.problem.tokens),
        int32("choices", "rows of a token: k", lambda at: at.problem.k),
        int32("columns", "of a token, in eights", lambda at: at.problem.columns),
        int32("row_count", "of all experts", lambda at: at.problem.rows),
    ]
    if operation.weights != "none":
        weight = element(operation.weights).cpp
        fields += [
            pointer("weights", f"const {weight}", "[count][choices], by these steps"),
            int64("weights_token", "elements to the next token", lambda at: at.problem.weights[0]),
            int64("weights_choice", "to the next choice", lambda at: at.problem.weights[1]),
        ]
    if combines:
        fields.append(int32("chunks", "CTAs of a token", lambda at: at.chunks))
        return block(fields)
    fields += [
        pointer("offsets", "const int32_t", "[experts]: the last ends the rows that have a token"),
        int32("experts", "in offsets; 0 where there are none", lambda at: at.problem.experts),
    ]
    if operation.dot:
        fields += [
            pointer("combined", f"const {cpp}", "[row_count][combined_pitch]: rows, as weighted"),
            pointer("gradient", element(operation.weights).cpp, "[count][choices]: of weights"),
            int64("combined_pitch", "between them", lambda at: at.problem.combined_pitch),
        ]
    return block(fields)


def launches(spec: CombineSpec, problem: CombineProblem, device: DeviceLimits) -> list[Launch]:
    """One launch. There must be pairs and columns; ProblemError for more than 32 bits count."""
    at = AtLaunch(spec, problem, device)
    threads = spec.schedule.threads
    warps = at.grid * (threads // _WARP)
    refuse_beyond(
        {
            f"tokens {problem.tokens}, k {problem.k}": problem.tokens * problem.k + warps,
            f"columns {problem.columns}": problem.columns + 4 * threads * VALUES,
            f"rows {problem.rows}": problem.rows + warps,
            f"tokens {problem.tokens}, columns {problem.columns}": at.grid,
        }
    )
    values = parameters(spec).values(at)
    return [Launch(spec.name, at.grid, threads, 1, 0, values, early=True)]


# ---- How long a call takes -----------------------------------------------------------------------

START = {
    "launch": 2e-6,  # seconds
    "bandwidth": 3.5e12,  # bytes a second of memory
    "block": 1e-7,  # seconds of a multiprocessor for a CTA
}


def seconds(
    constants: Value,
    operation: CombineOperation,
    schedule: CombineSchedule,
    shape: CombineShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    moved = shape.tokens * (1 + shape.k * (1 + operation.dot)) * shape.columns * operation.bytes
    threads = shape.tokens * shape.columns / 8
    if operation.direction == "permute":
        threads = shape.tokens * shape.k * 32
    blocks = threads / schedule.threads / multiprocessors
    return constants["launch"] + max(moved / constants["bandwidth"], blocks * constants["block"])

"""A call's only launch: CTAs of 64 rows by some slabs of K, of all experts, and where W goes."""

from __future__ import annotations

from collections.abc import Callable

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.dequantize.schedule import (
    DequantizeOperation,
    DequantizeProblem,
    DequantizeSchedule,
    DequantizeSpec,
)
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import refuse_beyond

AtLaunch = data.AtLaunch[DequantizeOperation, DequantizeSchedule, DequantizeProblem]


def parameters(spec: DequantizeSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: the quantized weight and its scales, W, and the sizes."""
    operation = spec.operation
    by_channel, twice = operation.group == 0, operation.weight.scaled_twice
    fields: list[Field[AtLaunch]] = []
    if operation.layout == "rows":
        fields += _rows(operation)
    else:
        fields.append(pointer("data", "const uint8_t", "[experts][row_blocks][slabs_of_k]: slabs"))
    if by_channel or twice:
        cpp = "float" if twice else element(operation.scale).cpp
        fields.append(pointer("channel_scales", f"const {cpp}", "[experts][row_blocks * 64]"))
    if by_channel and operation.weight.has_zeros:
        fields.append(pointer("channel_zeros", "const uint8_t", "[experts][row_blocks * 64]"))
    fields += [
        pointer("w", "uint16_t", "[experts][n][k]: the result"),
        int64("row_stride", "elements between rows of w", lambda at: at.problem.row_stride),
        int64("expert_stride", "elements between experts", lambda at: at.problem.expert_stride),
        int32("n", "rows of an expert", lambda at: at.problem.n),
        int32("k", "columns", lambda at: at.problem.k),
        int32("row_blocks", "slabs along n of an expert", lambda at: at.problem.row_blocks),
        int32("slabs_of_k", "slabs along k", lambda at: at.problem.slabs_of_k),
        int32("chunks", "CTAs along k", chunks),
    ]
    return block(fields)


def _rows(operation: DequantizeOperation) -> list[Field[AtLaunch]]:
    """Codes in rows, and the scales of their blocks."""
    scale = "uint8_t" if operation.scale == "e8m0" else "float"
    fields: list[Field[AtLaunch]] = [
        pointer("data", "const uint8_t", "[experts][n][k]: e4m3"),
        pointer("scales", f"const {scale}", "[experts][n / 128][k / 128], rounded up"),
        int64(
            "data_row_stride", "bytes between rows of data", lambda at: at.problem.data_strides[1]
        ),
        int64("data_expert_stride", "between experts", lambda at: at.problem.data_strides[0]),
    ]
    for place, name in enumerate(("expert", "row", "column")):
        fields.append(int64(f"scale_{name}_stride", "elements of scales", _scale_stride(place)))
    return fields


def _scale_stride(place: int) -> Callable[[AtLaunch], int]:
    return lambda at: at.problem.scale_strides[place]


def chunks(at: AtLaunch) -> int:
    """CTAs along k."""
    return -(-at.problem.slabs_of_k // at.schedule.slabs)


def launches(
    spec: DequantizeSpec, problem: DequantizeProblem, device: DeviceLimits
) -> list[Launch]:
    """Return the only launch of a call, whose experts, n and k are not 0.

    Raises ProblemError where CTAs, rows or columns are more than 32 bits count.
    """
    at = data.AtLaunch(spec, problem, device)
    grid = problem.experts * problem.row_blocks * chunks(at)
    columns = problem.slabs_of_k + spec.schedule.slabs
    refuse_beyond(
        {
            f"experts {problem.experts}, n {problem.n}, k {problem.k}": grid,
            f"n {problem.n}": problem.n + spec.schedule.tile[0],
            f"k {problem.k}": columns * spec.schedule.tile[1] // spec.schedule.slabs,
        }
    )
    values = parameters(spec).values(at)
    return [Launch(spec.name, grid, spec.schedule.threads, 1, 0, values, early=True)]

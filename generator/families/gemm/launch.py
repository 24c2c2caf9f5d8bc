"""GEMM at launch: the problem, the parameter block, the launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from warploom.generator.elements import element
from warploom.generator.epilogue import Residual
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.families.gemm.schedule import WGMMA_M, GemmOperation, GemmSchedule
from warploom.generator.launches import Address, Argument, DeviceLimits, Launch, Value, Workspace
from warploom.generator.parameters import Field, Kind, ParameterBlock, block
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import OperandTile, TensorMap


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """The extents of one call, and the pitch of each matrix: elements from row to row (or from
    column to column) of the memory it lies in. `pitch_c` has one entry per residual step.
    """

    m: int
    n: int
    k: int
    pitch_a: int
    pitch_b: int
    pitch_d: int
    pitch_c: tuple[int, ...] = ()


def _fields(spec: KernelSpec) -> tuple[GemmOperation, GemmSchedule]:
    return cast("GemmOperation", spec.operation), cast("GemmSchedule", spec.schedule)


def parameters(spec: KernelSpec) -> ParameterBlock:
    """The kernel's parameter block: what every GEMM has, then the fields of each step."""
    operation, schedule = _fields(spec)
    d_map = [Field("d_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", "D, in staging boxes")]
    d = [
        Field("d", Kind.POINTER, element(operation.d).cpp, "D[m][pitch]"),
        Field("d_pitch", Kind.INT64, "int64_t", "elements between rows of D"),
    ]
    return block(
        [
            Field("a_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", "A, in operand boxes"),
            Field("b_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", "B, in operand boxes"),
            *(d_map if schedule.store == "tma" else d),
            *(field for i, step in enumerate(operation.epilogue) for field in step.fields(i)),
            Field(
                "a_bytes",
                Kind.INT32,
                "int32_t",
                "of A in one stage: no row past the last is loaded",
            ),
            Field("m", Kind.INT32, "int32_t", "rows of D"),
            Field("n", Kind.INT32, "int32_t", "columns of D"),
            Field("k", Kind.INT32, "int32_t", "products summed"),
        ]
    )


def _a_tile(tile: OperandTile, m: int) -> OperandTile:
    """A's tile with no more rows than there are, in eights.

    TMA takes its time to fill the rest with zeros (at m = 1, 22.8 us became 16.3 for a weight of
    6144 x 4096), and the rows of D that they would make are not stored.
    """
    if not tile.k_major or tile.slices > 1:
        return tile
    return replace(tile, extent=min(tile.extent, -(-m // 8) * 8))


def _operand_map(tensor: str, tile: OperandTile, extent: int, k: int, pitch: int) -> Value:
    return TensorMap(
        tensor=tensor,
        element=tile.element,
        extents=(k, extent) if tile.k_major else (extent, k),
        pitches=(pitch * tile.element.bytes,),
        box=tile.box,
        span=tile.span,
    )


def _step_values(operation: GemmOperation, problem: GemmProblem) -> dict[str, Value]:
    values: dict[str, Value] = {}
    pitches = iter(problem.pitch_c)
    for index, step in enumerate(operation.epilogue):
        for field in step.fields(index):
            if field.kind is Kind.POINTER:
                values[field.name] = Address(field.name)
            elif field.kind is Kind.FLOAT:
                values[field.name] = Argument(field.name)
        if isinstance(step, Residual):
            values[f"residual_{index}_pitch"] = next(pitches)
    return values


def tiles(schedule: GemmSchedule, problem: GemmProblem) -> int:
    """The tiles of D, counted in clusters: each block of a cluster has one."""
    rows = schedule.tile[0] * schedule.cluster[0]
    columns = schedule.tile[1] * schedule.cluster[1]
    return -(-problem.m // rows) * -(-problem.n // columns)


def launches(spec: KernelSpec, problem: GemmProblem, device: DeviceLimits) -> list[Launch]:
    """One persistent launch. No extent may be 0: no tensor map describes an empty matrix.

    Tensors are named a, b, d, and as the epilogue's fields (`bias_0`, `residual_1`); host scalars
    are named as theirs (`scale_0`, `residual_1_beta`).
    """
    operation, schedule = _fields(spec)
    layout = gemm_layout(operation, schedule)
    d_element = element(operation.d)
    pitch_d = problem.pitch_d
    a_tile = _a_tile(layout.a, problem.m)
    values: dict[str, Value] = {
        "a_map": _operand_map("a", a_tile, problem.m, problem.k, problem.pitch_a),
        "b_map": _operand_map("b", layout.b, problem.n, problem.k, problem.pitch_b),
        "a_bytes": a_tile.bytes,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        **_step_values(operation, problem),
    }
    if schedule.store == "tma":
        box, extents = (layout.chunk_columns, WGMMA_M), (problem.n, problem.m)
        pitches = (pitch_d * d_element.bytes,)
        values["d_map"] = TensorMap("d", d_element, extents, pitches, box, layout.store_span)
    else:
        values |= {"d": Address("d"), "d_pitch": pitch_d}
    clusters = max(1, device.multiprocessors // schedule.cluster_size)
    return [
        Launch(
            entry=spec.name,
            grid=min(tiles(schedule, problem), clusters) * schedule.cluster_size,
            block=schedule.threads,
            cluster=schedule.cluster_size,
            shared_bytes=layout.shared_bytes,
            parameters=values,
        )
    ]


def workspaces(spec: KernelSpec, problem: GemmProblem) -> list[Workspace]:
    """None: the accumulators never leave the block."""
    return []

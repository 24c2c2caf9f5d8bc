"""GEMM at launch: the problem, the parameter block, the launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.generator import limits
from warploom.generator.elements import Element, element
from warploom.generator.epilogue import Residual
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule, GemmSpec
from warploom.generator.launches import Address, Argument, DeviceLimits, Launch, Value
from warploom.generator.parameters import Field, Kind, ParameterBlock, block
from warploom.generator.tensor_maps import OperandTile, TensorMap


@dataclass(frozen=True, slots=True)
class Batches:
    """How the batches of A or B lie, where D has some: `count` of its own, `pitch` elements apart.

    Each serves `repeat` batches of D in a row; after the last comes the first again.
    """

    count: int = 1
    pitch: int = 0
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """The extents of one call, and the pitch of each matrix: elements from row to row (or from
    column to column) of the memory it lies in. `pitch_c` has one entry per residual step.

    A batched operation has the number of D's batches, how those of A and B lie, and the elements
    between the batches of D and of each step's operand that has a `batch_field`.
    """

    m: int
    n: int
    k: int
    pitch_a: int
    pitch_b: int
    pitch_d: int
    pitch_c: tuple[int, ...] = ()
    batches: int = 1
    batches_a: Batches = Batches()
    batches_b: Batches = Batches()
    batch_pitch_d: int = 0
    batch_pitch_steps: tuple[int, ...] = ()


def parameters(spec: GemmSpec) -> ParameterBlock:
    """The kernel's parameter block: what every GEMM has, then the fields of each step."""
    operation, schedule = spec.operation, spec.schedule
    d_map = [Field("d_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", "D, in staging boxes")]
    d = [
        Field("d", Kind.POINTER, element(operation.d).cpp, "D[m][pitch]"),
        Field("d_pitch", Kind.INT64, "int64_t", "elements between rows of D"),
    ]
    if operation.batched:
        d.append(Field("d_batch", Kind.INT64, "int64_t", "elements between batches of D"))
    trims_a = gemm_layout(operation, schedule).trims_a
    tail_map = Field(
        "a_tail_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", "A, in boxes of the tail"
    )
    return block(
        [
            Field("a_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", "A, in operand boxes"),
            *([tail_map] if trims_a else []),
            Field("b_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", "B, in operand boxes"),
            *(d_map if schedule.store == "tma" else d),
            *(field for i, step in enumerate(operation.epilogue) for field in step.fields(i)),
            *([_int("a_tail_rows", "of A in the last tile along m, in eights")] if trims_a else []),
            _int("m", "rows of D"),
            _int("n", "columns of D"),
            _int("k", "products summed"),
            *(_batch_fields(operation) if operation.batched else ()),
        ]
    )


def _int(name: str, meaning: str) -> Field:
    return Field(name, Kind.INT32, "int32_t", meaning)


def _batch_fields(operation: GemmOperation) -> list[Field]:
    steps = (step.batch_field(i) for i, step in enumerate(operation.epilogue))
    return [
        *(field for field in steps if field is not None),
        _int("batches", "of D"),
        _int("a_batches", "of A"),
        _int("a_repeat", "batches of D in a row that one of A serves"),
        _int("b_batches", "of B"),
        _int("b_repeat", "batches of D in a row that one of B serves"),
    ]


def _tail(tile: OperandTile, m: int) -> OperandTile:
    """The last tile of A along m, with no more rows than there are, in eights for each slice.

    TMA takes its time to fill the rest with zeros (at m = 1, 22.8 us became 16.3 for a weight of
    6144 x 4096), and the rows of D that they would make are not stored.
    """
    rows = (m - 1) % tile.extent + 1
    eights = 8 * tile.slices
    return replace(tile, extent=-(-rows // eights) * eights)


def _tensor_map(
    tensor: str,
    element: Element,
    matrix: tuple[tuple[int, int], int],
    box: tuple[int, int],
    batches: Batches | None,
    **options: int,
) -> TensorMap:
    """The map of a matrix: its (columns, rows) and pitch, in boxes; with batches, of all."""
    extents, pitch = matrix
    maps = TensorMap(tensor, element, extents, (pitch * element.bytes,), box, **options)
    if batches is None:
        return maps
    # A single batch may claim any pitch that TMA takes.
    apart = batches.pitch if batches.count > 1 else pitch * extents[1]
    return replace(
        maps,
        extents=(*extents, batches.count),
        pitches=(*maps.pitches, apart * element.bytes),
        box=(*box, 1),
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


def _batch_values(operation: GemmOperation, problem: GemmProblem) -> dict[str, Value]:
    steps = (step.batch_field(i) for i, step in enumerate(operation.epilogue))
    names = [field.name for field in steps if field is not None]
    return {
        **dict(zip(names, problem.batch_pitch_steps, strict=True)),
        "batches": problem.batches,
        "a_batches": problem.batches_a.count,
        "a_repeat": problem.batches_a.repeat,
        "b_batches": problem.batches_b.count,
        "b_repeat": problem.batches_b.repeat,
    }


def tiles(schedule: GemmSchedule, problem: GemmProblem) -> int:
    """The tiles of all batches of D, counted in clusters: each block has one, or shares it."""
    rows = schedule.tile[0] * schedule.cluster[0]
    columns = schedule.tile[1] * schedule.cluster[1]
    return -(-problem.m // rows) * -(-problem.n // columns) * problem.batches


def _counted(schedule: GemmSchedule, problem: GemmProblem, clusters: int) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `limits.refuse_beyond`."""
    m, n, k = schedule.tile
    rows, columns = m * schedule.cluster[0], n * schedule.cluster[1]
    along_m, count = schedule.raster == "along_m", tiles(schedule, problem)
    across = -(-problem.n // columns) if along_m else -(-problem.m // rows)
    turns = schedule.consumers // schedule.sharing
    return {
        f"m {problem.m}": problem.m + rows,
        f"n {problem.n}": problem.n + columns,
        f"k {problem.k}": problem.k + k * schedule.split,
        f"m {problem.m}, n {problem.n}, batches {problem.batches}: {count} tiles of {m}x{n}": (
            count + turns * clusters  # the first that is not one any more
        ),
        f"group {schedule.group} of {across} tiles": schedule.group * across,
    }


def launches(spec: GemmSpec, problem: GemmProblem, device: DeviceLimits) -> list[Launch]:
    """One persistent launch. No extent may be 0: no tensor map describes an empty matrix.

    Tensors are named a, b, d, and as the epilogue's fields (`bias_0`, `residual_1`); host scalars
    are named as theirs (`scale_0`, `residual_1_beta`). Raises ProblemError for extents beyond 32
    bits.
    """
    operation, schedule = spec.operation, spec.schedule
    clusters = min(tiles(schedule, problem), device.clusters(schedule.cluster_size))
    limits.refuse_beyond(_counted(schedule, problem, clusters))
    layout = gemm_layout(operation, schedule)
    values = {
        **_operand_values(operation, schedule, problem),
        **_step_values(operation, problem),
        **(_batch_values(operation, problem) if operation.batched else {}),
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
    }
    if schedule.store == "tma":
        batches = Batches(problem.batches, problem.batch_pitch_d) if operation.batched else None
        matrix = (problem.n, problem.m), problem.pitch_d
        box, span = layout.store_box, layout.store_span
        values["d_map"] = _tensor_map("d", element(operation.d), matrix, box, batches, span=span)
    else:
        values |= {"d": Address("d"), "d_pitch": problem.pitch_d}
        values |= {"d_batch": problem.batch_pitch_d} if operation.batched else {}
    return [
        Launch(
            entry=spec.name,
            grid=clusters * schedule.cluster_size,
            block=schedule.threads,
            cluster=schedule.cluster_size,
            shared_bytes=layout.shared_bytes,
            parameters=values,
            early=True,
        )
    ]


def _operand_values(
    operation: GemmOperation, schedule: GemmSchedule, problem: GemmProblem
) -> dict[str, Value]:
    layout = gemm_layout(operation, schedule)

    def operand_map(name: str, tile: OperandTile) -> TensorMap:
        of_a = name == "a"
        extent, pitch = (problem.m, problem.pitch_a) if of_a else (problem.n, problem.pitch_b)
        batches = problem.batches_a if of_a else problem.batches_b
        return _tensor_map(
            name,
            tile.element,
            ((problem.k, extent) if tile.k_major else (extent, problem.k), pitch),
            tile.box,
            batches if operation.batched else None,
            span=tile.span,
            promotion=schedule.l2_promotion,
        )

    b_map = operand_map("b", layout.b)
    if not layout.trims_a:
        return {"a_map": operand_map("a", layout.a), "b_map": b_map}
    tail = _tail(layout.a, problem.m)
    # A single row of tiles is all tail; equal maps are encoded once.
    whole = layout.a if problem.m > layout.a.extent else tail
    return {
        "a_map": operand_map("a", whole),
        "a_tail_map": operand_map("a", tail),
        "b_map": b_map,
        "a_tail_rows": tail.extent,
    }

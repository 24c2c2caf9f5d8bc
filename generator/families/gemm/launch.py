"""GEMM at launch: how many blocks, and what they cannot count to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from warploom.generator.elements import ELEMENTS
from warploom.generator.epilogue import gate_of, scatters
from warploom.generator.families._product import SINGLE, Batches, launch
from warploom.generator.families._product.groups import (
    few_tiles,
    into_ranges,
    most_tiles,
    refuse_groups,
)
from warploom.generator.families._product.launch import (
    MOST_BLOCKS,
    Cut,
    cut,
    extents,
    finished,
    kernel_launches,
    operand_a,
    part_workspaces,
    partial_workspaces,
)
from warploom.generator.families.gemm.layout import GemmLayout, gemm_layout
from warploom.generator.families.gemm.scales import CPP
from warploom.generator.families.gemm.schedule import (
    SPARSE_BLOCK,
    GemmOperation,
    GemmSchedule,
    GemmSpec,
)
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.parameters import (
    Field,
    ParameterBlock,
    block,
    int32,
    int64,
    pointer,
    tensor_map,
)
from warploom.generator.shapes import refuse_beyond
from warploom.generator.tensor_maps import OperandTile, TensorMap, gated_map

LIST_THREADS = 1024  # of the block that makes lists of a mask

ROWS_END = 1 << 30
"""Where the rows of a bounded map end, in its second and its last dimension."""


@dataclass(frozen=True, slots=True)
class ScaleStrides:
    """How the block scales of A or B lie: elements from one to the next along its rows, being
    [M, K] or [N, K], and along k; and their batches, where D has some.
    """

    row: int = 0
    k: int = 0
    batches: Batches = SINGLE


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """The extents of one call, and the pitch of each matrix: elements from row to row (or from
    column to column) of the memory it lies in. `pitch_c` has one entry for each matrix that a step
    reads or stores. Of a gated product n is both halves, and D has half as many columns.

    A batched operation has the number of D's batches, how those of A and B lie, and the elements
    between the batches of D and of each step's operand that has a `batch_field`. `mask_strides` are
    those of the mask of a sparse matrix, along the blocks that have lists, and along these.

    Of a grouped GEMM batches are its groups, and m or k are the rows of all of them. `rows_d` are
    the rows of D where these are scattered: m are those of A.
    """

    m: int
    n: int
    k: int
    pitch_a: int
    pitch_b: int
    pitch_d: int
    pitch_c: tuple[int, ...] = ()
    batches: int = 1
    batches_a: Batches = SINGLE
    batches_b: Batches = SINGLE
    batch_pitch_d: int = 0
    batch_pitch_steps: tuple[int, ...] = ()
    scales_a: ScaleStrides = ScaleStrides()
    scales_b: ScaleStrides = ScaleStrides()
    mask_strides: tuple[int, int] = (0, 0)
    place: int = 0  # elements from a piece of A or B to the next, where these are pieces
    rows_d: int = 0


def bounded(plain: TensorMap) -> TensorMap:
    """The map of a matrix whose boxes stop at any row, whatever follows that in memory.

    Rows are counted by two dimensions, each from row to row: a box that is to have `valid` rows up
    to the row `end` is at (ROWS_END - valid, end). Its other rows lie past the end of the first,
    where TMA loads zeros and stores nothing. The last dimension takes ROWS_END rows off: its step
    is 2^34 elements less a row, and ROWS_END times 2^34 is nothing in an address of 64 bits. The
    map begins at the matrix, since TMA reads that address even for boxes that have nothing of it.
    """
    (columns, rows), (pitch,) = plain.extents, plain.pitches
    return replace(
        plain,
        extents=(columns, ROWS_END, rows + 1, ROWS_END + 1),
        pitches=(pitch, pitch, (plain.element.bytes << 34) - pitch),
        box=(*plain.box, 1, 1),
    )


class AtLaunch(launch.AtLaunch[GemmOperation, GemmSchedule, GemmProblem]):
    """What a GEMM's parameters are functions of."""

    @cached_property
    def layout(self) -> GemmLayout:
        """Where everything of one block lies."""
        return gemm_layout(self.operation, self.schedule)

    def b_map(self) -> TensorMap:
        """Of the tiles of B."""
        problem, gate = self.problem, gate_of(self.operation.epilogue)
        plain = self.operand_map("b", self.layout.b, problem.n, problem.pitch_b, problem.batches_b)
        return gated_map(plain, interleaved=gate.layout == "interleaved") if gate else plain


class PiecesAtLaunch(AtLaunch):
    """What those of a GEMM of pieces are, which an operand has side by side along k."""

    def operand_map(
        self, tensor: str, tile: OperandTile, extent: int, pitch: int, batches: Batches
    ) -> TensorMap:
        """The map of all pieces of an operand."""
        found = super().operand_map(tensor, tile, extent, pitch, batches)
        if tensor == "b" and self.operation.whole_b:
            return found
        width = self.operation.pieces * self.problem.place
        return replace(found, extents=(width, *found.extents[1:]))


class GroupedAtLaunch(AtLaunch):
    """What those of a grouped GEMM are."""

    def most(self) -> GemmProblem:
        """The GEMM of as many tiles as groups may have, whatever their offsets or lengths are."""
        return _most(self.spec, self.problem)

    @cached_property
    def cut(self) -> Cut:
        """How tiles go to clusters, of as many as there may be: the device decides what is cut."""
        whole = cut(replace(self.schedule, stream_k=False), self.most(), self.device)
        if not self.schedule.stream_k:
            return whole
        size = self.schedule.cluster_size
        return into_ranges(whole, min(self.device.clusters(size), MOST_BLOCKS // size))

    def d_map(self) -> TensorMap:
        """Of the staging boxes of D, which stop at the end of a group of rows."""
        if self.operation.groups == "k":
            return super().d_map()
        problem, layout, d = self.problem, self.layout, ELEMENTS[self.operation.d]
        n = problem.n // 2 if gate_of(self.operation.epilogue) else problem.n
        pitches = (problem.pitch_d * d.bytes,)
        plain = TensorMap("d", d, (n, problem.m), pitches, layout.store_box, span=layout.store_span)
        return bounded(plain)

    def operand_map(
        self, tensor: str, tile: OperandTile, extent: int, pitch: int, batches: Batches
    ) -> TensorMap:
        """The map of an operand: groups of rows of A are no batches; those of k are none, and end
        anywhere in operands whose rows are k.
        """
        by_k = self.operation.groups == "k"
        if tensor == "b" and not by_k:
            return super().operand_map(tensor, tile, extent, pitch, batches)
        k = self.problem.k
        plain = TensorMap(
            tensor,
            tile.element,
            (k, extent) if tile.k_major else (extent, k),
            (pitch * tile.element.bytes,),
            tile.box,
            span=tile.span,
            promotion=self.schedule.l2_promotion,
        )
        return bounded(plain) if by_k and not tile.k_major else plain


def _most(spec: GemmSpec, problem: GemmProblem) -> GemmProblem:
    """The GEMM of as many tiles as groups may have, whatever their offsets or lengths are."""
    if spec.operation.groups == "masked":
        return replace(problem, m=-(-problem.m // problem.batches))
    return most_tiles(spec.schedule, problem) if spec.operation.groups == "rows" else problem


def at_launch(spec: GemmSpec, problem: GemmProblem, device: DeviceLimits) -> AtLaunch:
    """What the parameters of one launch are functions of."""
    operation = spec.operation
    if operation.groups != "none":
        return GroupedAtLaunch(spec, problem, device)
    return (AtLaunch if operation.terms == 1 else PiecesAtLaunch)(spec, problem, device)


@lru_cache(maxsize=1024)  # each is wanted by launches, and where these are bound
def parameters(spec: GemmSpec) -> ParameterBlock[AtLaunch]:
    """The kernel's parameter block."""
    operation, schedule = spec.operation, spec.schedule
    trimmed = gemm_layout(operation, schedule).trims_a
    fields: list[Field[AtLaunch]] = [
        *operand_a(trimmed=trimmed),
        tensor_map("b_map", "B, in operand boxes", AtLaunch.b_map),
        *finished(operation, schedule),
        *(
            few_tiles() if operation.groups != "none" and field.name == "cut" else field
            for field in extents(operation, schedule, trimmed=trimmed)
        ),
        *(_groups(operation) if operation.groups != "none" else ()),
        *(_batches(operation) if operation.batched and operation.groups == "none" else ()),
        *(_scales(operation, "a") if operation.block_scales != "none" else ()),
        *(_scales(operation, "b") if operation.block_scales != "none" else ()),
        *(_lists(operation) if operation.sparse != "none" else ()),
        *((_place(),) if operation.terms > 1 else ()),
        *(_spans() if operation.spans != "any" else ()),
        *((_rows_d(),) if scatters(operation.epilogue) else ()),
    ]
    return block(fields)


def _place() -> Field[AtLaunch]:
    return int32("piece_pitch", "elements between pieces along k", lambda at: at.problem.place)


def _rows_d() -> Field[AtLaunch]:
    return int32(
        "d_rows", "rows of D, which indices are compared with", lambda at: at.problem.rows_d
    )


def _spans() -> list[Field[AtLaunch]]:
    """What the launches that made the pieces counted in each operand."""
    told = "[4]: the most small or lost values of a row of {}, the most lost, k"
    return [pointer(f"span_{name}", "const uint32_t", told.format(name.upper())) for name in "ab"]


def _scales(operation: GemmOperation, operand: Literal["a", "b"]) -> list[Field[AtLaunch]]:
    """The block scales of A or B, read by address and strides."""

    def of(at: AtLaunch) -> ScaleStrides:
        return at.problem.scales_a if operand == "a" else at.problem.scales_b

    name, side = f"{operand}_scales", "m" if operand == "a" else "n"
    each, upper = operation.scale_rows(operand), operand.upper()
    element = operation.block_scale_a if operand == "a" else operation.block_scale_b
    fields: list[Field[AtLaunch]] = [
        pointer(
            name, f"const {CPP[element]}", f"a scale for each {each} {side} x 128 k of {upper}"
        ),
        int64(f"{name}_row", f"elements between those along {side}", lambda at: of(at).row),
        int64(f"{name}_k", "elements between those along k", lambda at: of(at).k),
    ]
    if operation.groups != "none" and operand == "b":
        fields.append(int64(f"{name}_batch_pitch", "elements between groups", _pitch))
    elif operation.batched and operation.groups == "none":
        own, served = f"{name}_batch", "batches of D in a row that one serves"
        fields += [
            int64(f"{own}_pitch", "elements between batches", lambda at: of(at).batches.pitch),
            int32(f"{own}_count", "batches of them", lambda at: of(at).batches.count),
            int32(f"{own}_repeat", served, lambda at: of(at).batches.repeat),
        ]
    return fields


def _pitch(at: AtLaunch) -> int:
    """Elements from the block scales of a group's B to the next's."""
    return at.problem.scales_b.batches.pitch


def _lists(operation: GemmOperation) -> list[Field[AtLaunch]]:
    """The mask of the sparse matrix, and the lists that the first launch makes of it."""
    listed = "n" if operation.sparse == "b" else "m"
    across = "n" if operation.sparse == "d" else "k"
    fields: list[Field[AtLaunch]] = [
        pointer("mask", "const uint8_t", "not 0 for each block of 128x128 that counts"),
        int64("mask_row", f"elements of it between blocks along {listed}", _mask_stride(0)),
        int64("mask_column", f"elements of it between blocks along {across}", _mask_stride(1)),
    ]
    if operation.sparse == "d":
        return [*fields, pointer("tiles", "int", "blocks of D, those of zeros as -1 - number")]
    return [
        *fields,
        pointer("lists", "int", f"[{listed} / 128][2]: block along {listed}, number of entries"),
        pointer("entries", "int", f"[{listed} / 128][k / 128]: blocks along k that count"),
    ]


def _mask_stride(side: int) -> Callable[[AtLaunch], int]:
    return lambda at: at.problem.mask_strides[side]


def _batches(operation: GemmOperation) -> list[Field[AtLaunch]]:
    steps = (step.batch_field(index) for index, step in enumerate(operation.epilogue))
    served = "batches of D in a row that one of"
    return [
        *(field for field in steps if field is not None),
        int32("batches", "of D", lambda at: at.problem.batches),
        int32("a_batches", "of A", lambda at: at.problem.batches_a.count),
        int32("a_repeat", f"{served} A serves", lambda at: at.problem.batches_a.repeat),
        int32("b_batches", "of B", lambda at: at.problem.batches_b.count),
        int32("b_repeat", f"{served} B serves", lambda at: at.problem.batches_b.repeat),
    ]


def _groups(operation: GemmOperation) -> list[Field[AtLaunch]]:
    steps = (step.batch_field(index, "groups") for index, step in enumerate(operation.epilogue))
    ends = f"where each group of {operation.groups} ends"
    masked = operation.groups == "masked"
    return [
        *(field for field in steps if field is not None),
        pointer("offsets", "const int", "how many rows of each group count" if masked else ends),
        int32("batches", "groups", lambda at: at.problem.batches),
    ]


def _blocks(operation: GemmOperation, problem: GemmProblem) -> tuple[int, int]:
    """Blocks of the sparse matrix that have lists, or rows of these, and along each."""
    sides = {"a": ("m", "k"), "b": ("n", "k"), "d": ("m", "n")}[operation.sparse]
    rows, columns = (-(-int(getattr(problem, side)) // SPARSE_BLOCK) for side in sides)
    return rows, columns


def workspaces(spec: GemmSpec, problem: GemmProblem) -> list[Workspace]:
    """Lists of a mask (of tiles, or the blocks of each and how many these are), partial sums of
    columns, and of parts of tiles.
    """
    operation, schedule = spec.operation, spec.schedule
    lists = list[Workspace]()
    if operation.sparse != "none":
        rows, columns = _blocks(operation, problem)
        if operation.sparse == "d":
            size, spare = schedule.cluster_size, 2 * schedule.cluster_size - 2
            places = (rows * columns + spare) // size * size
            lists = [Workspace("tiles", 4 * (places + rows))]
        else:
            lists = [Workspace("lists", 4 * 3 * rows), Workspace("entries", 4 * rows * columns)]
    sums = gemm_layout(operation, schedule).sums_bytes
    parts = part_workspaces(schedule, _most(spec, problem), sums)
    return lists + partial_workspaces(spec, problem) + parts


def launches(spec: GemmSpec, problem: GemmProblem, device: DeviceLimits) -> list[Launch]:
    """One persistent launch, one that adds up parts of k, and one for each step with partial sums;
    first of all one that makes lists of a mask, if there is one.

    No extent may be 0: no tensor map describes an empty matrix. Tensors are named a, b, d, and as
    the epilogue's fields (`bias_0`, `residual_1`); host scalars are named as theirs (`scale_0`,
    `residual_1_beta`). Raises ProblemError for extents beyond 32 bits.
    """
    schedule = spec.schedule
    at = at_launch(spec, problem, device)
    if spec.operation.groups == "masked":  # whose rows are counted through all batches
        rows = schedule.tile[0] * schedule.cluster[0]
        refuse_beyond({f"m {problem.m}": problem.m + rows})
    if spec.operation.groups != "none":
        refuse_groups(problem.batches)
    if spec.operation.block_scales != "none":  # whose distances in a row of D are counted in bytes
        places = {"scale_a": problem.scales_a.row, "scale_b": problem.scales_b.row}
        refuse_beyond({f"stride {row} of {name}": 4 * row for name, row in places.items()})
    if spec.operation.sparse in ("a", "b"):  # of D they are tiles
        rows, columns = _blocks(spec.operation, problem)
        told = f"sparse {spec.operation.sparse}: {rows}x{columns} blocks"
        refuse_beyond({told: rows * columns})
    if problem.rows_d:
        refuse_beyond({f"rows of D {problem.rows_d}": problem.rows_d})
    values = parameters(spec).values(at)
    every = kernel_launches(at, values)
    if spec.operation.sparse != "none":
        every.insert(0, Launch(f"{spec.name}_lists", 1, LIST_THREADS, 1, 0, values, early=True))
    return every

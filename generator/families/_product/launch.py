"""A product at launch: its problem, how tiles go to clusters, parameters, launches, workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import launches as launch
from warploom.generator.elements import ELEMENTS, Element
from warploom.generator.epilogue import gate_of, scatters
from warploom.generator.families._product.layout import ProductLayout
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.launches import DeviceLimits, Launch, Value, Workspace
from warploom.generator.parameters import Field, int32, int64, pointer, tensor_map
from warploom.generator.shapes import LARGEST, refuse_beyond
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import OperandTile, TensorMap
from warploom.generator.wgmma import WARPGROUP, WGMMA_M


@dataclass(frozen=True, slots=True)
class Batches:
    """How the batches of A or B lie, where D has some: `count` of its own, `pitch` elements apart.

    Each serves `repeat` batches of D in a row; after the last comes the first again.
    """

    count: int = 1
    pitch: int = 0
    repeat: int = 1


SINGLE = Batches()


# ---- Problems ------------------------------------------------------------------------------------


class Extents(Protocol):
    """What of a product decides its tiles."""

    @property
    def m(self) -> int:
        """Rows of D."""
        ...

    @property
    def n(self) -> int:
        """Columns of D."""
        ...

    @property
    def k(self) -> int:
        """Products summed."""
        ...

    @property
    def batches(self) -> int:
        """Batches of D."""
        ...


class ProductProblem(Extents, Protocol):
    """And how its matrices lie: pitches are elements from row to row, and from batch to batch."""

    @property
    def pitch_a(self) -> int:
        """Of A's rows."""
        ...

    @property
    def pitch_d(self) -> int:
        """Of D's rows."""
        ...

    @property
    def pitch_c(self) -> tuple[int, ...]:
        """Of the rows of each matrix that a step reads or stores."""
        ...

    @property
    def batches_a(self) -> Batches:
        """How A's batches lie."""
        ...

    @property
    def batch_pitch_d(self) -> int:
        """Of D's batches."""
        ...

    @property
    def batch_pitch_steps(self) -> tuple[int, ...]:
        """Of the batches of each step's operand that has a `batch_field`."""
        ...


def tiles(schedule: ProductSchedule, problem: Extents) -> int:
    """The tiles of all batches of D, counted in clusters: each block has one, or shares it."""
    rows = schedule.tile[0] * schedule.cluster[0]
    columns = schedule.tile[1] * schedule.cluster[1]
    return -(-problem.m // rows) * -(-problem.n // columns) * problem.batches


def parts_of_k(schedule: ProductSchedule, problem: Extents) -> int:
    """The parts that a second launch adds up: each has a k tile at least."""
    k_tiles = -(-problem.k // (schedule.tile[2] * schedule.cluster_split_k))
    return max(1, min(schedule.split_k, k_tiles))


def rows_of_partial(schedule: ProductSchedule) -> int:
    """The rows of D of one partial sum: those of wgmma that a warp has of a fragment."""
    return 8 if schedule.swap_ab else 16


def row_groups(schedule: ProductSchedule, problem: Extents) -> int:
    """The partial sums of a column of one batch of D."""
    return -(-problem.m // rows_of_partial(schedule))


# ---- Tiles to clusters ---------------------------------------------------------------------------
#
# Stream-K cuts tiles: their k tiles go to all clusters alike, and each gets a range of them. Where
# tiles fill some waves and a bit, those of the bit and of one wave are cut, so that every range has
# the length of one to two tiles; where there are fewer tiles than clusters, all are, into equal
# parts where that costs little. What is cut must save more than it costs, as measured on an H200
# (docs/notebook.md).

# K tiles of a block in the time of which a part is left, found and added: 10 us of 128x256.
EXCHANGE = 8
# Of a range: clusters that are at different k of the same rows read them from L2 one by one.
APART = 8
MOST_PARTS = 16  # of a tile: one cluster adds them up
# Multiprocessors of the largest GPU that kernels are for: what room for parts is made for.
MOST_BLOCKS = 144


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tiles of one call go to clusters: the first `tiles` in ranges, then whole ones.

    Of `split_k` each part of a tile's k counts as a tile.
    """

    clusters: int  # that are launched, each with a range where tiles are cut
    tiles: int
    all_tiles: int
    k_tiles: int  # of each tile, that a block of its own or of a split has

    @property
    def whole(self) -> int:
        """Whole tiles of the busiest cluster."""
        return -(-(self.all_tiles - self.tiles) // max(1, self.clusters))

    @property
    def range_k_tiles(self) -> int:
        """K tiles of the longest range."""
        return -(-self.tiles * self.k_tiles // max(1, self.clusters))

    @property
    def busiest(self) -> int:
        """K tiles of the busiest cluster."""
        return self.range_k_tiles + self.whole * self.k_tiles

    @property
    def waves(self) -> float:
        """How many times as long as for a whole tile the busiest cluster takes."""
        return self.whole + (self.range_k_tiles / self.k_tiles if self.tiles else 0)

    @property
    def aligned(self) -> bool:
        """Whether all tiles are cut alike, or none: clusters then come to the same k together."""
        return self.tiles == 0 or self.clusters % self.tiles == 0

    @property
    def lost(self) -> int:
        """K tiles of a cluster in whose time parts are exchanged, and operands waited for."""
        if not self.tiles:
            return 0
        return EXCHANGE + (0 if self.aligned else self.range_k_tiles // APART)

    @property
    def parts(self) -> int:
        """How many clusters a tile that is cut goes to, at most; 0 where none is."""
        if not self.tiles:
            return 0
        return -(-self.clusters // self.tiles) + (not self.aligned)


def cut(schedule: ProductSchedule, problem: Extents, device: DeviceLimits) -> Cut:
    """Divide a call's tiles; without stream-K all are whole, and clusters take turns."""
    count = tiles(schedule, problem)
    k_tiles = -(-problem.k // (schedule.tile[2] * schedule.cluster_split_k))
    size = schedule.cluster_size
    clusters, parts = device.clusters(size), parts_of_k(schedule, problem)
    count, k_tiles = count * parts, -(-k_tiles // parts)
    whole = Cut(min(count, clusters), 0, count, k_tiles)
    if not schedule.stream_k:
        return whole
    clusters = min(clusters, MOST_BLOCKS // size)
    if count < clusters:
        ranges = min(clusters, MOST_PARTS * count, count * k_tiles // EXCHANGE)
        found = Cut(max(count, ranges), count, count, k_tiles)
        alike = replace(found, clusters=found.clusters // count * count)
        if alike.busiest + alike.lost <= found.busiest + found.lost:
            found = alike
    else:
        found = Cut(clusters, count % clusters + clusters, count, k_tiles)
    counted = found.tiles * k_tiles * found.clusters <= LARGEST  # as the kernel does
    return found if counted and found.busiest + found.lost <= whole.busiest else whole


# ---- Parameters ----------------------------------------------------------------------------------

OperationT = TypeVar("OperationT", bound=ProductOperation, covariant=True, default=ProductOperation)
ScheduleT = TypeVar("ScheduleT", bound=ProductSchedule, covariant=True, default=ProductSchedule)
ProblemT = TypeVar("ProblemT", bound=ProductProblem, covariant=True, default=ProductProblem)


class AtLaunch(launch.AtLaunch[OperationT, ScheduleT, ProblemT]):
    """What a product's parameters are functions of: `epilogue.Pitches`, too."""

    @property
    def layout(self) -> ProductLayout:
        """Where everything of one block lies."""
        raise NotImplementedError

    @cached_property
    def tail(self) -> OperandTile:
        """The last tile of A along m, with no more rows than there are, in eights for each slice.

        TMA takes its time to fill the rest with zeros (at m = 1, 22.8 us became 16.3 for a weight
        of 6144 x 4096), and the rows of D that they would make are not stored.
        """
        tile = self.layout.a
        rows = (self.problem.m - 1) % tile.extent + 1
        eights = 8 * tile.slices
        return replace(tile, extent=-(-rows // eights) * eights)

    def most(self) -> ProductProblem:
        """The GEMM of as many tiles as there may be, wherever groups end."""
        return self.problem

    @cached_property
    def cut(self) -> Cut:
        """How tiles go to clusters: as many as there may be."""
        return cut(self.schedule, self.most(), self.device)

    def a_map(self) -> TensorMap:
        """Of the tiles of A, but for the last where that one is trimmed.

        A single row of tiles is all tail; equal maps are encoded once.
        """
        single = self.layout.trims_a and self.problem.m <= self.layout.a.extent
        return self._a_map(self.tail if single else self.layout.a)

    def a_tail_map(self) -> TensorMap:
        """Of the last tile of A along m."""
        return self._a_map(self.tail)

    def d_map(self) -> TensorMap:
        """Of the staging boxes of D."""
        problem = self.problem
        n = problem.n // 2 if gate_of(self.operation.epilogue) else problem.n
        return self.tensor_map(
            "d",
            ELEMENTS[self.operation.d],
            ((n, problem.m), problem.pitch_d),
            self.layout.store_box,
            Batches(problem.batches, problem.batch_pitch_d),
            span=self.layout.store_span,
        )

    def pitch(self, step: int) -> int:
        """Elements from row to row of the matrix that a step reads."""
        steps = enumerate(self.operation.epilogue)
        pitched = [i for i, one in steps if one.pitched]
        return dict(zip(pitched, self.problem.pitch_c, strict=True))[step]

    def batch_pitch(self, step: int) -> int:
        """Elements from batch to batch of what a step reads."""
        steps = enumerate(self.operation.epilogue)
        batched = [i for i, one in steps if one.batch_field(i)]
        return dict(zip(batched, self.problem.batch_pitch_steps, strict=True))[step]

    def groups(self, step: int) -> int:
        """Partial sums that are added up to one of a step's sums."""
        each = row_groups(self.schedule, self.problem)
        return each * self.problem.batches // self.vectors(step)

    def partial_batch(self) -> int:
        """Elements between the partial sums of batches of D."""
        return row_groups(self.schedule, self.problem) * self.problem.n

    def vectors(self, step: int) -> int:
        """Vectors of sums that a step has: one for each batch of D, or one for all."""
        apart = self.operation.batched and self.batch_pitch(step)
        return self.problem.batches if apart else 1

    def _a_map(self, tile: OperandTile) -> TensorMap:
        problem = self.problem
        return self.operand_map("a", tile, problem.m, problem.pitch_a, problem.batches_a)

    def operand_map(
        self, tensor: str, tile: OperandTile, extent: int, pitch: int, batches: Batches
    ) -> TensorMap:
        """The map of an operand, which has so many rows of k (columns, where those are apart)."""
        k = self.problem.k
        return self.tensor_map(
            tensor,
            tile.element,
            ((k, extent) if tile.k_major else (extent, k), pitch),
            tile.box,
            batches,
            span=tile.span,
            promotion=self.schedule.l2_promotion,
        )

    def tensor_map(
        self,
        tensor: str,
        element: Element,
        matrix: tuple[tuple[int, int], int],
        box: tuple[int, int],
        batches: Batches,
        **options: int,
    ) -> TensorMap:
        """The map of a matrix: its (columns, rows) and pitch, in boxes; of all its batches."""
        extents, pitch = matrix
        single = TensorMap(tensor, element, extents, (pitch * element.bytes,), box, **options)
        if not self.operation.batched:
            return single
        # A single batch may claim any pitch that TMA takes.
        apart = batches.pitch if batches.count > 1 else pitch * extents[1]
        return replace(
            single,
            extents=(*extents, batches.count),
            pitches=(*single.pitches, apart * element.bytes),
            box=(*box, 1),
        )


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `refuse_beyond`."""
    schedule, problem = at.schedule, at.most()
    m, n, k = schedule.tile
    rows, columns = m * schedule.cluster[0], n * schedule.cluster[1]
    along_m, parts = schedule.raster == "along_m", parts_of_k(schedule, problem)
    count = tiles(schedule, problem)
    what = f"m {problem.m}, n {problem.n}, batches {problem.batches}: {count} tiles of {m}x{n}"
    if parts > 1:
        what += f", k in {parts} parts"
    across = -(-problem.n // columns) if along_m else -(-problem.m // rows)
    turns = schedule.consumers // schedule.sharing
    return {
        f"m {problem.m}": problem.m + rows,
        f"n {problem.n}": problem.n + columns,
        f"k {problem.k}": problem.k + k * schedule.cluster_split_k,
        what: count * parts + turns * at.cut.clusters,  # the first that is not one any more
        f"swizzle_size {schedule.swizzle_size} of {across} tiles": schedule.swizzle_size * across,
    }


def part_workspaces(
    schedule: ProductSchedule, problem: ProductProblem, sums_bytes: int
) -> list[Workspace]:
    """Where parts of tiles are left: of `split_k`, all; of tiles that are cut, a place for each
    block, and a flag for each of its warps that is 0 between launches.
    """
    if schedule.split_k > 1:
        count = tiles(schedule, problem) * schedule.multicast * parts_of_k(schedule, problem)
        return [Workspace("partial_tiles", count * sums_bytes)]
    if not schedule.stream_k:
        return []
    clusters = MOST_BLOCKS // schedule.cluster_size
    if tiles(schedule, problem) < clusters:
        clusters = min(clusters, MOST_PARTS * tiles(schedule, problem))
    flags = 4 * schedule.cluster_size * schedule.consumers * WARPGROUP // 32
    return [
        Workspace("parts", clusters * sums_bytes * schedule.multicast),
        Workspace("raised", clusters * flags, kept=True),
    ]


# ---- Fields of the parameter block that do not depend on what B is -------------------------------


def operand_a(*, trimmed: bool) -> list[Field[AtLaunch]]:
    """The maps of A; `trimmed`: the last tile along m has one of its own."""
    a_map: Field[AtLaunch] = tensor_map("a_map", "A, in operand boxes", AtLaunch.a_map)
    fields = [a_map]
    if trimmed:
        fields.append(tensor_map("a_tail_map", "A, in boxes of the tail", AtLaunch.a_tail_map))
    return fields


def finished(operation: ProductOperation, schedule: ProductSchedule) -> list[Field[AtLaunch]]:
    """Where D lies, and what each step of the epilogue reads and stores."""
    fields: list[Field[AtLaunch]] = []
    if schedule.store == "tma" and not scatters(operation.epilogue):
        fields.append(tensor_map("d_map", "D, in staging boxes", lambda at: at.d_map()))
    else:
        fields += [
            pointer("d", ELEMENTS[operation.d].cpp, "D[m][pitch]"),
            int64("d_pitch", "elements between rows of D", lambda at: at.problem.pitch_d),
        ]
        if operation.batched and not operation.by_rows:
            meaning = "elements between batches of D"
            fields.append(int64("d_batch", meaning, lambda at: at.problem.batch_pitch_d))
    for index, step in enumerate(operation.epilogue):
        fields += step.fields(index)
        if step.partial:
            fields += _partial(operation, index)
    return fields


def extents(
    operation: ProductOperation, schedule: ProductSchedule, *, trimmed: bool
) -> list[Field[AtLaunch]]:
    """How large D is and how much is summed; where parts of tiles are left, if k is shared."""
    fields: list[Field[AtLaunch]] = []
    if trimmed:
        meaning = "of A in the last tile along m, in eights"
        fields.append(int32("a_tail_rows", meaning, lambda at: at.tail.extent))
    fields += [
        int32("m", "rows of D", lambda at: at.problem.m),
        int32(
            "n",
            "columns of gate and up, twice those of D"
            if gate_of(operation.epilogue)
            else "columns of D",
            lambda at: at.problem.n,
        ),
        int32("k", "columns of A, rows of B", lambda at: at.problem.k),
    ]
    if schedule.split_k > 1:
        return fields + _split_k(operation)
    return fields + (_cut(operation) if schedule.stream_k else [])


def partial_name(operation: ProductOperation, step: int) -> str:
    """What the field of a step's sums is called, and what is called after it."""
    return operation.epilogue[step].fields(step)[0].name


def _partial(operation: ProductOperation, step: int) -> list[Field[AtLaunch]]:
    name = partial_name(operation, step)
    fields: list[Field[AtLaunch]] = [
        pointer(f"{name}_partial", "float", "partial[groups of rows][n]"),
        int64(f"{name}_groups", "partial sums of one sum", lambda at: at.groups(step)),
    ]
    if operation.batched:
        meaning = "elements between the partial sums of batches"
        fields.append(int64(f"{name}_partial_batch", meaning, lambda at: at.partial_batch()))
    return fields


def _cut(operation: ProductOperation) -> list[Field[AtLaunch]]:
    return [
        pointer("parts", operation.accumulator.cpp, "sums of parts of tiles, by blocks"),
        pointer("raised", "int", "a flag for each warp of each block that leaves a part"),
        int32("cut", "tiles that are cut: the first", lambda at: at.cut.tiles),
    ]


def _split_k(operation: ProductOperation) -> list[Field[AtLaunch]]:
    return [
        pointer("partial_tiles", operation.accumulator.cpp, "sums of each part of k, by tiles"),
        int32("k_parts", "parts of k", lambda at: parts_of_k(at.schedule, at.problem)),
    ]


# ---- Sums over rows, in two launches -------------------------------------------------------------
#
# The first stores those of a few rows each; one for each such step adds these up, in one order.

PARTIAL_COLUMNS, PARTIAL_THREADS = (
    32,
    1024,
)  # of a block that adds up; a warp has a row of its columns


def partial_workspaces(
    spec: KernelSpec[ProductOperation, ProductSchedule], problem: Extents
) -> list[Workspace]:
    """The partial sums of each step that has some: fp32, for each group of rows and each column."""
    workspaces = list[Workspace]()
    for index, step in enumerate(spec.operation.epilogue):
        if step.partial:
            size = 4 * problem.batches * row_groups(spec.schedule, problem) * problem.n
            name = f"{partial_name(spec.operation, index)}_partial"
            workspaces.append(Workspace(name, size))
    return workspaces


# ---- The second launch of `split_k` --------------------------------------------------------------
#
# It adds up the partial tiles of all parts of k, in one order, and has the epilogue and the store.
# A block of one warpgroup has a chunk of a tile: 64 rows of wgmma by as few columns as the store
# takes, so that there are enough blocks for L2's bandwidth where D is small.

IN_FLIGHT = 16  # fragments of parts, 4 registers each, that a thread reads at a time
FRAGMENT = 8  # columns of wgmma


def parts_at_once(layout: ProductLayout) -> int:
    """Parts of k that a thread reads at a time: all fragments of its chunk of each."""
    return max(1, IN_FLIGHT * FRAGMENT // layout.chunk_columns)


# ---- Launches ------------------------------------------------------------------------------------


def kernel_launches(at: AtLaunch, values: Mapping[str, Value]) -> list[Launch]:
    """One persistent launch, one that adds up parts of k, and one for each step with partial sums.

    Raises ProblemError for sizes beyond 32 bits.
    """
    refuse_beyond(_counted(at))
    schedule, layout, problem, name = at.schedule, at.layout, at.problem, at.spec.name
    size, shared = schedule.cluster_size, layout.shared_bytes
    grid = at.cut.clusters * size
    launches = [Launch(name, grid, schedule.threads, size, shared, values, early=True)]
    if schedule.split_k > 1:
        chunks = schedule.rows // WGMMA_M * (schedule.columns // layout.chunk_columns)
        grid = tiles(schedule, problem) * schedule.multicast * chunks
        mnb = f"m {problem.m}, n {problem.n}, batches {problem.batches}"
        refuse_beyond({f"{mnb}: blocks that add up parts of k": grid})
        shared = layout.reduction_bytes
        entry = f"{name}_reduction"
        launches.append(Launch(entry, grid, WARPGROUP, 1, shared, values, early=True))
    for index, step in enumerate(at.operation.epilogue):
        if step.partial:
            grid = -(-problem.n // PARTIAL_COLUMNS) * at.vectors(index)
            nb = f"n {problem.n}, batches {problem.batches}"
            refuse_beyond({f"{nb}: blocks of sums": grid})
            entry = f"{name}_{partial_name(at.operation, index)}"
            launches.append(Launch(entry, grid, PARTIAL_THREADS, 1, 0, values, early=True))
    return launches

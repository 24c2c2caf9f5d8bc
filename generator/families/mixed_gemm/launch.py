"""A product with weights of few bits at launch: how many blocks, and what they cannot count to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from warploom.generator import configurations
from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product import SINGLE, Batches, launch
from warploom.generator.families._product.cells import ProductShape, layers
from warploom.generator.families._product.groups import (
    few_tiles,
    into_ranges,
    most_tiles,
    refuse_groups,
)
from warploom.generator.families._product.launch import (
    MOST_BLOCKS,
    Cut,
    Extents,
    extents,
    finished,
    kernel_launches,
    operand_a,
    part_workspaces,
    partial_workspaces,
    tiles,
)
from warploom.generator.families.mixed_gemm.layout import MixedGemmLayout, mixed_gemm_layout
from warploom.generator.families.mixed_gemm.schedule import (
    MixedGemmOperation,
    MixedGemmSchedule,
    MixedGemmSpec,
)
from warploom.generator.formats import SCALE_TYPES
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.parameters import Field, ParameterBlock, block, int32, pointer
from warploom.generator.shapes import Work, refuse_beyond
from warploom.generator.slabs import DEPTH, ROWS
from warploom.generator.tensor_maps import OperandTile, TensorMap

_LARGEST_PRODUCT = 1 << 14  # of two int8 numbers: -128 by -128


class MixedGemmShape(ProductShape):
    """A [m, k] by W [n, k]; batches of A are rows of it.

    Of a grouped GEMM batches are its groups, of m rows each on average.
    """

    __slots__ = ()


def parse_shape(operation: MixedGemmOperation, text: str) -> MixedGemmShape:
    """The shape that `4096x6144x4096` is, of groups `128x2x5760x2880`."""
    return MixedGemmShape.parse(text, batched=operation.batched)


def cells(
    operation: MixedGemmOperation, model: str | None, rows: Sequence[int]
) -> list[MixedGemmShape]:
    """The weights of a model, or those that are measured, where they are of whole groups."""
    if operation.batched:
        return []
    listed = configurations.cells()["mixed_gemm"]
    weights = layers(model) if model else listed["weights"]
    whole = [(n, k) for n, k in weights if k % (operation.group or 1) == 0]
    return [MixedGemmShape(m, n, k) for n, k in whole for m in rows or listed["m"]]


@dataclass(frozen=True, slots=True)
class MixedGemmProblem:
    """The extents of one call, and the pitch of each matrix: elements from row to row of the memory
    it lies in. `pitch_c` has one entry for each matrix that a step reads or stores.

    W lies in slabs that are full, whatever n and k are: see generator/slabs.py. Of a grouped GEMM
    batches are its groups, m is the rows of all of them, and steps' operands are groups apart.
    """

    m: int
    n: int
    k: int
    pitch_a: int
    pitch_d: int
    pitch_c: tuple[int, ...] = ()
    batches: int = 1
    batch_pitch_steps: tuple[int, ...] = ()

    @property
    def batches_a(self) -> Batches:
        """A is one matrix."""
        return SINGLE

    @property
    def batch_pitch_d(self) -> int:
        """D is one matrix."""
        return 0


EXCHANGE = 5  # k tiles in the time of which a part is left, found and added, as measured


def cut(schedule: MixedGemmSchedule, problem: Extents, device: DeviceLimits) -> Cut:
    """Divide a call's tiles: each to a cluster of its own where its blocks split k.

    With stream-K all tiles are cut, wherever that is: a range of slabs lies in memory in one piece,
    and a part of few rows of A is small. Where tiles make many waves, those of one wave and of what
    is left over are.
    """
    count, k_tiles = tiles(schedule, problem), -(-problem.k // schedule.tile[2])
    if schedule.cluster_split_k > 1:
        return Cut(count, 0, count, -(-k_tiles // schedule.cluster_split_k))
    clusters = device.clusters(1) * schedule.ctas_per_sm
    whole = Cut(min(count, clusters), 0, count, k_tiles)
    if not schedule.stream_k:
        return whole
    return into_ranges(whole, min(clusters, MOST_BLOCKS * schedule.ctas_per_sm))


def waves(schedule: MixedGemmSchedule, problem: Extents, device: DeviceLimits) -> float:
    """How much of D the busiest multiprocessor gets, in tiles of 64 by 64."""
    found, each = cut(schedule, problem, device), schedule.row_blocks * schedule.tile[0] / 64
    if schedule.cluster_split_k > 1:
        return (
            -(-found.clusters * schedule.cluster_split_k // device.multiprocessors)
            / schedule.cluster_split_k
            * each
        )
    lost = EXCHANGE / found.k_tiles if found.tiles else 0
    return (found.waves + lost) * schedule.ctas_per_sm * each


class AtLaunch(launch.AtLaunch[MixedGemmOperation, MixedGemmSchedule, MixedGemmProblem]):
    """What a product's parameters are functions of."""

    @cached_property
    def layout(self) -> MixedGemmLayout:
        """Where everything of one block lies."""
        return mixed_gemm_layout(self.operation, self.schedule)

    def most(self) -> MixedGemmProblem:
        """The GEMM of as many tiles as there may be, wherever groups end."""
        grouped = self.operation.groups == "rows"
        return most_tiles(self.schedule, self.problem) if grouped else self.problem

    @cached_property
    def cut(self) -> Cut:
        """How tiles go to clusters: as many as there may be."""
        return cut(self.schedule, self.most(), self.device)

    def operand_map(
        self, tensor: str, tile: OperandTile, extent: int, pitch: int, batches: Batches
    ) -> TensorMap:
        """The map of A, whose groups of rows are no batches."""
        k, bytes_ = self.problem.k, tile.element.bytes
        options = {"span": tile.span, "promotion": self.schedule.l2_promotion}
        return TensorMap(tensor, tile.element, (k, extent), (pitch * bytes_,), tile.box, **options)


@lru_cache(maxsize=1024)  # each is wanted by launches, and where these are bound
def parameters(spec: MixedGemmSpec) -> ParameterBlock[AtLaunch]:
    """The kernel's parameter block."""
    operation, schedule = spec.operation, spec.schedule
    trimmed = mixed_gemm_layout(operation, schedule).trims_a
    fields: list[Field[AtLaunch]] = [
        *operand_a(trimmed=trimmed),
        pointer("b", "const uint8_t", "W, in slabs"),
        *_channels(operation),
        *finished(operation, schedule),
        *(
            field
            for field in extents(operation, schedule, trimmed=trimmed)
            if operation.groups == "none" or field.name != "cut"  # which the device finds
        ),
        *(_groups(operation) if operation.groups == "rows" else ()),
        int32("row_blocks", "of 64 rows of W", lambda at: -(-at.problem.n // ROWS)),
        int32("slabs", "of k, in each of them", lambda at: -(-at.problem.k // DEPTH)),
    ]
    if operation.groups == "rows" and schedule.stream_k:
        fields.append(few_tiles())
    return block(fields)


def _channels(operation: MixedGemmOperation) -> list[Field[AtLaunch]]:
    """Scales and zero points of rows, where they have one for all k, or beside those of groups."""
    twice = operation.weight.scaled_twice
    if operation.group and not twice:
        return []
    cpp = element("fp32" if twice else operation.scale).cpp
    fields: list[Field[AtLaunch]] = [pointer("channel_scales", f"const {cpp}", "of rows of W")]
    if operation.weight.has_zeros:
        fields.append(pointer("channel_zeros", "const uint8_t", "likewise"))
    return fields


def _groups(operation: MixedGemmOperation) -> list[Field[AtLaunch]]:
    """Where groups end, and how far apart the operands of steps are."""
    steps = (step.batch_field(index, "groups") for index, step in enumerate(operation.epilogue))
    return [
        *(field for field in steps if field is not None),
        pointer("offsets", "const int", "where each group of rows ends"),
        int32("batches", "groups", lambda at: at.problem.batches),
    ]


def workspaces(spec: MixedGemmSpec, problem: MixedGemmProblem) -> list[Workspace]:
    """Partial sums of columns, and of tiles that are cut."""
    sums = mixed_gemm_layout(spec.operation, spec.schedule).sums_bytes
    most = most_tiles(spec.schedule, problem) if spec.operation.groups == "rows" else problem
    parts = part_workspaces(spec.schedule, most, sums)
    every = [replace(one, bytes=one.bytes * spec.schedule.ctas_per_sm) for one in parts]
    return partial_workspaces(spec, problem) + every


def launches(spec: MixedGemmSpec, problem: MixedGemmProblem, device: DeviceLimits) -> list[Launch]:
    """One launch, and one for each step whose partial sums are added up.

    No extent may be 0: no tensor map describes an empty matrix. Tensors are named a, b (the slabs),
    d, and as the epilogue's fields. Raises ProblemError for extents beyond 32 bits. It reads b
    before the launch that comes before it on the stream is done: see docs/families/mixed_gemm.md.
    """
    at = AtLaunch(spec, problem, device)
    if spec.operation.groups == "rows":
        refuse_groups(problem.batches)
        rows = problem.batches * -(-problem.n // ROWS) * ROWS
        refuse_beyond({f"{problem.batches} groups of n {problem.n}: rows of W": rows})
    if spec.operation.a == "int8" and not spec.operation.group:
        refuse_beyond({f"k {problem.k}: accumulators in int32": problem.k * _LARGEST_PRODUCT})
    return kernel_launches(at, parameters(spec).values(at))


# ---- What a problem asks of any kernel -----------------------------------------------------------


def work(operation: MixedGemmOperation, shape: MixedGemmShape) -> Work:
    """Count operands once: codes and scales of W, A, and D."""
    m, n, k = shape.m, shape.n, shape.k
    a, d = element(operation.a), element(operation.d)
    scales = n * (k // operation.group if operation.group else 1)
    stored = n // 2 if gate_of(operation.epilogue) else n
    moved = n * k * operation.weight.bits / 8 + scales * SCALE_TYPES[operation.scale].bytes
    moved += m * k * a.bytes + m * stored * d.bytes
    moved += sum(step.moved(m, n, d) for step in operation.epilogue)
    return Work(2.0 * m * n * k * shape.batches, moved * shape.batches, a.bits)

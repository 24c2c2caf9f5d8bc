"""The backward pass at launch: the parameter block of its three kernels, launches, workspaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from warploom.generator.elements import element
from warploom.generator.families._attention import launch
from warploom.generator.families._attention.launch import SCALE, SHARING, bounds, lengths
from warploom.generator.families.attention_backward.layout import (
    MINIMUM_SPAN,
    AttentionBackwardLayout,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.order import Order, order_of
from warploom.generator.families.attention_backward.problem import (
    AttentionBackwardProblem,
    Tiles,
    tiles_of,
)
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
    AttentionBackwardSpec,
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
from warploom.generator.tensor_maps import TensorMap
from warploom.generator.wgmma import WGMMA_M


class AtLaunch(
    launch.AtLaunch[AttentionBackwardOperation, AttentionBackwardSchedule, AttentionBackwardProblem]
):
    """What the backward's parameters are functions of."""

    @cached_property
    def layout(self) -> AttentionBackwardLayout:
        """Where everything of one block lies."""
        return attention_backward_layout(self.spec.architecture, self.operation, self.schedule)

    @cached_property
    def tiles(self) -> Tiles:
        """How many tiles there are."""
        return tiles_of(self.spec, self.problem)

    @cached_property
    def order(self) -> Order:
        """In which order kv tiles are worked off."""
        return order_of(self.spec, self.problem, self.device, self.tiles)

    @property
    def lists(self) -> int:
        """Lists of one head: of every tile of keys."""
        return self.tiles.kv_tiles

    @property
    def list_tiles(self) -> int:
        """Tiles that a list has room for."""
        return self.tiles.q_tiles

    def statistics_map(self) -> TensorMap:
        """The map of lse, delta and, with a bias, what lse lacks.

        A bulk copy without a map would do, but compute-sanitizer takes it for the thread's own
        write, and its racecheck knows no barrier that completes by bytes: what threads read is a
        hazard.
        """
        q_tile = self.schedule.q_tile
        return TensorMap(
            tensor="statistics",
            element=element("fp32"),
            extents=(q_tile, self.layout.statistics * self.tiles.all_q_tiles),
            pitches=(4 * q_tile,),
            box=(q_tile, self.layout.statistics),
            span=MINIMUM_SPAN,
        )

    def ds_map(self) -> TensorMap:
        """The map of the gradients of scores: the box of 64 columns that a warpgroup has."""
        kind, problem = element(self.operation.element), self.problem
        batch, heads, rows, columns = problem.scores
        pitches = (step * kind.bytes for step in problem.strides_ds[::-1])
        return TensorMap(
            tensor="ds",
            element=kind,
            extents=(columns, rows, heads, batch),
            pitches=tuple(pitches),
            box=(WGMMA_M, self.schedule.q_tile, 1, 1),
            span=128,
        )


_EVERY: tuple[Field[AtLaunch], ...] = (
    pointer("dlse", "float", "the gradient of lse, laid out as it is; may be null"),
    pointer("statistics", "float", "[head, q tile, kStatistics, row]"),
    pointer("dq_sum", "float", "[head, q tile, ...]: dq, as accumulators are laid out"),
    int32("kv_tiles", "of one head", lambda at: at.tiles.kv_tiles),
    int32("q_tiles", "of one head", lambda at: at.tiles.q_tiles),
    int32("section", "kv heads whose tiles are processed together", lambda at: at.order.section),
    int32("all_kv_heads", "of all batches", lambda at: at.tiles.all_kv_heads),
    SHARING,
    int32("dim", "of the tensors, at most kDim", lambda at: at.problem.dim),
    SCALE,
)
_ORDERED: tuple[Field[AtLaunch], ...] = (
    pointer("turns", "int32_t", "[head, q tile, part]: kv tiles that added to dq"),
    pointer("counter", "int32_t", "of tickets that blocks of main have taken"),
    int32(
        "leftward", "whether kv tiles add to dq from right to left", lambda at: at.order.leftward
    ),
)


def _maps(
    dimensions: str, read: tuple[str, ...], gradients: tuple[str, ...]
) -> list[Field[AtLaunch]]:
    """The tensors that are read by TMA, and those of dk and dv that are written so."""

    def mapped(name: str, box: str, rows: Callable[[AtLaunch], int]) -> Field[AtLaunch]:
        meaning = f"{dimensions}, by {box}"
        return tensor_map(f"{name}_map", meaning, lambda at: at.tensor_map(name, rows(at)))

    return [
        mapped("q", "a q tile", lambda at: at.schedule.q_tile),
        mapped("k", "rows of a CTA", lambda at: at.layout.kv_rows),
        mapped("v", "rows of a CTA", lambda at: at.layout.kv_rows),
        *(mapped(name, "a q tile", lambda at: at.schedule.q_tile) for name in read),
        *(mapped(name, "64 rows", lambda at: WGMMA_M) for name in gradients),
        tensor_map(
            "statistics_map",
            "[row, statistics of q tiles], by a q tile",
            AtLaunch.statistics_map,
        ),
    ]


def _rows(name: str) -> list[Field[AtLaunch]]:
    """A tensor that is read or written without TMA."""

    def stride(index: int) -> Callable[[AtLaunch], int]:
        return lambda at: at.strides(name)[index]

    return [
        pointer(f"{name}_rows", "Element", f"{name}, by the strides below", tensor=name),
        *(
            int64(f"{name}_{axis}", f"stride of {name}, in elements", stride(index))
            for index, axis in enumerate(("batch", "head", "seq"))
        ),
    ]


def parameters(spec: AttentionBackwardSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: what every kernel reads, then what only some do."""
    operation, packed = spec.operation, spec.operation.lengths == "packed"
    alone = spec.schedule.cluster == 1  # else dk and dv are summed up by several blocks
    gradients = ("dk", "dv")
    dimensions = "[dim, row, head, first]" if packed else "[dim, seq, head, batch]"
    fields: list[Field[AtLaunch]] = [
        *_maps(
            dimensions,
            ("do", "dq") if operation.masks_rows else ("do",),
            gradients if alone else (),
        ),
        *lengths(packed=packed),
        *_EVERY,
    ]
    if operation.dim_v:
        meaning = "of v, o and do; at most kDimV"
        fields.append(int32("dim_v", meaning, lambda at: at.problem.dim_v or at.problem.dim))
    if operation.bias_gradient:
        meaning = "[column, row, head, batch], by a q tile"
        fields.append(tensor_map("ds_map", meaning, AtLaunch.ds_map))
    again = ("q", "k") if operation.bias != "none" else ()  # for scores that are computed twice
    for name in ("o", "do", "dq", *again, *(() if alone else gradients)):
        fields += _rows(name)
    if operation.masks_rows:
        meaning = "[head, q tile]: whether do of a fully masked row is NaN or Inf"
        fields.append(pointer("non_finite", "int32_t", meaning))
    if operation.deterministic:
        fields += _ORDERED
    modifiers = operation.modifiers
    fields += [field for modifier in modifiers for field in modifier.parameters()]
    fields += [field for modifier in modifiers for field in modifier.gradient_parameters()]
    fields += [field for modifier in modifiers for field in modifier.weight_parameters()]
    for modifier in modifiers:
        fields += modifier.tile_parameters("int32_t", "int4", "column, 32 rows")
    return block([*fields, *bounds(operation.mask, packed=packed)])


# ---- Launches and workspaces ---------------------------------------------------------------------

ROW_THREADS = 256  # of a block of the preprocess and postprocess kernels


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `refuse_beyond`."""
    schedule, tiles = at.schedule, at.tiles
    q_tile, kv_tile = schedule.tile
    blocks = tiles.all_kv_tiles * at.layout.parts * schedule.cluster
    return {
        **at.lengths_counted(schedule.tile),
        f"{tiles.q_tiles} tiles of {q_tile} rows": tiles.q_tiles * q_tile,
        f"{tiles.kv_tiles} tiles of {kv_tile} columns": tiles.kv_tiles * kv_tile,
        # Of each two or three statistics, and at most two parts of its sums.
        f"{tiles.all_heads} heads of {tiles.q_tiles} tiles": (
            at.layout.statistics * tiles.all_q_tiles
        ),
        f"{tiles.all_kv_heads} heads of {tiles.kv_tiles} tiles of columns": blocks,
    }


def launches(
    spec: AttentionBackwardSpec, problem: AttentionBackwardProblem, device: DeviceLimits
) -> list[Launch]:
    """Three launches, in order. No extent may be 0: no tensor map describes an empty tensor.

    Tensors are named q, k, v, o, do, lse and dlse (fp32, contiguous; dlse is null where lse has no
    gradient), dq, dk, dv, for packed lengths cu_seqlens_q and cu_seqlens_k (int32), the tensors of
    its modifiers, and the workspaces. The gradients of packed rows that are of no sequence become
    0. The host scalars are `scale`, which must be positive, and those of its modifiers. Raises
    ProblemError for extents beyond 32 bits.
    """
    at = AtLaunch(spec, problem, device)
    refuse_beyond(_counted(at))
    schedule, tiles, values = spec.schedule, at.tiles, parameters(spec).values(at)

    def launch(suffix: str, grid: int, block: int, cluster: int, shared_bytes: int) -> Launch:
        return Launch(spec.name + suffix, grid, block, cluster, shared_bytes, values, early=True)

    return [
        launch("_preprocess", tiles.all_q_tiles, ROW_THREADS, 1, 0),
        launch(
            "",
            tiles.all_kv_tiles * at.layout.parts * schedule.cluster,
            schedule.threads,
            schedule.cluster_size,
            at.layout.shared_bytes,
        ),
        launch("_postprocess", tiles.all_q_tiles, ROW_THREADS, 1, 0),
    ]


def workspaces(spec: AttentionBackwardSpec, problem: AttentionBackwardProblem) -> list[Workspace]:
    """Statistics of every row, and the sums of dq in fp32, by whole q tiles.

    A deterministic kernel counts the kv tiles that added to each, and the blocks that have begun.
    """
    operation, schedule = spec.operation, spec.schedule
    tiles = tiles_of(spec, problem).all_q_tiles
    rows = tiles * schedule.q_tile
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    found = [
        Workspace("statistics", layout.statistics * 4 * rows),
        Workspace("dq_sum", operation.dim * 4 * rows),
    ]
    if operation.masks_rows:
        found.append(Workspace("non_finite", 4 * tiles))
    if operation.deterministic:
        found += [
            Workspace("turns", 4 * tiles * layout.parts),
            Workspace("counter", 4),
        ]
    for modifier in operation.modifiers:
        found += modifier.workspaces(problem)
    for modifier in operation.modifiers:
        found += modifier.gradient_workspaces(tiles)
    return found

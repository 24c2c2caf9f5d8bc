"""The backward at launch: the problem, its three launches and its workspaces."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator import limits
from warploom.generator.elements import element
from warploom.generator.families._attention.parameters import bound_values, length_values
from warploom.generator.families._attention.problem import (
    AttentionProblem,
    Strides,
    lengths_counted,
)
from warploom.generator.families._attention.tensor_map import tensor_map
from warploom.generator.families.attention_backward.layout import (
    MINIMUM_SPAN,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardSpec,
)
from warploom.generator.launches import Address, Argument, DeviceLimits, Launch, Value, Workspace
from warploom.generator.tensor_maps import TensorMap
from warploom.generator.wgmma import WGMMA_M

# Of q, do and the sums of dq that blocks in flight work on where rows are bounded: with k and v
# they stay in 50 MB of L2. Else all tiles take as long, and one head after the other is 1.5 to 2 %
# faster.
SECTION_BYTES = 32 << 20
# Kv tiles of a head that run at a time where they wait for each other's turns: each begins a step
# after the one before. With fewer less of q, do and the sums is found in L2.
TILES_IN_TURN = 4
# Rounds of blocks from which on kv tiles of a bounded mask add leftward. None waits for long then
# (d64 causal 2k: 0.92 of the speed in any order, else 0.85), but the longest end last. Only where
# several heads fit L2, as tiles work on different rows of q then (d256 causal 16k: 0.85, not 0.92).
LEFTWARD_ROUNDS = 8
ROW_THREADS = 256  # of a block of the preprocess and postprocess kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackwardProblem(AttentionProblem):
    """The forward's problem, and where the gradients lie: strides of (batch, head, seq)."""

    strides_do: Strides
    strides_dq: Strides
    strides_dk: Strides
    strides_dv: Strides


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How many tiles there are of one head, and heads in all; packed: as many as there can be.

    There, what follows the last sequence counts as one more.
    """

    q_tiles: int
    kv_tiles: int
    all_heads: int
    all_kv_heads: int

    @property
    def all_q_tiles(self) -> int:
        return self.q_tiles * self.all_heads

    @property
    def all_kv_tiles(self) -> int:
        return self.kv_tiles * self.all_kv_heads


def _tiles(spec: AttentionBackwardSpec, problem: AttentionBackwardProblem) -> _Tiles:
    operation, schedule = spec.operation, spec.schedule
    if operation.lengths == "packed":
        return _Tiles(
            q_tiles=problem.total_q // schedule.q_tile + problem.batch + 1,
            kv_tiles=problem.total_k // schedule.kv_tile + problem.batch + 1,
            all_heads=problem.heads,
            all_kv_heads=problem.kv_heads,
        )
    return _Tiles(
        q_tiles=-(-problem.seq_q // schedule.q_tile),
        kv_tiles=-(-problem.seq_k // schedule.kv_tile),
        all_heads=problem.heads * problem.batch,
        all_kv_heads=problem.kv_heads * problem.batch,
    )


def _maps(spec: AttentionBackwardSpec, problem: AttentionBackwardProblem) -> dict[str, Value]:
    operation, schedule = spec.operation, spec.schedule
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    kind = element(operation.element)

    def mapped(name: str, strides: Strides, rows: int) -> TensorMap:
        box, packed = (layout.box_columns, rows), operation.lengths == "packed"
        return tensor_map(name, kind, problem, strides, box, layout.span, packed=packed)

    maps: dict[str, Value] = {
        "q_map": mapped("q", problem.strides_q, schedule.q_tile),
        "k_map": mapped("k", problem.strides_k, layout.kv_rows),
        "v_map": mapped("v", problem.strides_v, layout.kv_rows),
        "do_map": mapped("do", problem.strides_do, schedule.q_tile),
    }
    if schedule.cluster == 1:
        maps["dk_map"] = mapped("dk", problem.strides_dk, WGMMA_M)
        maps["dv_map"] = mapped("dv", problem.strides_dv, WGMMA_M)
    # A bulk copy without a map would do, but compute-sanitizer takes it for the thread's own write,
    # and its racecheck knows no barrier that completes by bytes: what threads read is a hazard.
    maps["statistics_map"] = TensorMap(
        tensor="statistics",
        element=element("fp32"),
        extents=(schedule.q_tile, 2 * _tiles(spec, problem).all_q_tiles),
        pitches=(4 * schedule.q_tile,),
        box=(schedule.q_tile, 2),
        span=MINIMUM_SPAN,
    )
    return maps


def _rows(name: str, strides: Strides) -> dict[str, Value]:
    return {
        f"{name}_rows": Address(name),
        **{f"{name}_{axis}": s for axis, s in zip(("batch", "head", "seq"), strides, strict=True)},
    }


@dataclass(frozen=True, slots=True)
class _Order:
    """In which order kv tiles are worked off.

    By sections of `section` kv heads: the first tiles of all its heads, which are the longest of a
    causal mask, then the second, and so on; `leftward` from the last tiles on.
    """

    section: int
    leftward: bool


def _order(
    spec: AttentionBackwardSpec,
    problem: AttentionBackwardProblem,
    device: DeviceLimits,
    tiles: _Tiles,
) -> _Order:
    operation, schedule = spec.operation, spec.schedule
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    sharing = problem.heads // problem.kv_heads
    kv_head_bytes = sharing * problem.seq_q * problem.dim * (2 + 2 + 4)
    section, leftward = max(1, SECTION_BYTES // kv_head_bytes), False
    if operation.deterministic:
        at_a_time = device.multiprocessors // (layout.parts * schedule.cluster)
        rounds = tiles.kv_tiles * tiles.all_kv_heads / at_a_time
        bounded = operation.mask != "none"
        leftward = bounded and section > 1 and rounds >= LEFTWARD_ROUNDS
        if not leftward:
            section = max(section, -(-at_a_time // TILES_IN_TURN))
    elif operation.mask == "none":
        section = 1
    return _Order(min(section, tiles.all_kv_heads), leftward)


def _values(
    spec: AttentionBackwardSpec, problem: AttentionBackwardProblem, device: DeviceLimits
) -> dict[str, Value]:
    operation, schedule = spec.operation, spec.schedule
    packed, tiles = operation.lengths == "packed", _tiles(spec, problem)
    order = _order(spec, problem, device, tiles)
    values: dict[str, Value] = {
        **_maps(spec, problem),
        **{name: Address(name) for name in ("lse", "dlse", "statistics", "dq_sum")},
        "kv_tiles": tiles.kv_tiles,
        "q_tiles": tiles.q_tiles,
        "section": order.section,
        "all_kv_heads": tiles.all_kv_heads,
        "sharing": problem.heads // problem.kv_heads,
        "dim": problem.dim,
        "scale": Argument("scale"),
        **_rows("o", problem.strides_o),
        **_rows("do", problem.strides_do),
        **_rows("dq", problem.strides_dq),
        **length_values(problem, packed=packed),
        **bound_values(operation.mask, problem, packed=packed),
    }
    if schedule.cluster > 1:
        values |= {**_rows("dk", problem.strides_dk), **_rows("dv", problem.strides_dv)}
    if operation.deterministic:
        values |= {name: Address(name) for name in ("turns", "counter")}
        values["leftward"] = order.leftward
    if operation.softcap:
        values["softcap"] = Argument("softcap")
    return values


def _counted(spec: AttentionBackwardSpec, problem: AttentionBackwardProblem) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `limits.refuse_beyond`."""
    operation, schedule = spec.operation, spec.schedule
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    packed, tiles = operation.lengths == "packed", _tiles(spec, problem)
    q_tile, kv_tile = schedule.tile
    blocks = tiles.all_kv_tiles * layout.parts * schedule.cluster
    return {
        **lengths_counted(problem, operation.mask, schedule.tile, packed=packed),
        f"{tiles.q_tiles} tiles of {q_tile} rows": tiles.q_tiles * q_tile,
        f"{tiles.kv_tiles} tiles of {kv_tile} columns": tiles.kv_tiles * kv_tile,
        # Two statistics of each, and at most two parts of its sums.
        f"{tiles.all_heads} heads of {tiles.q_tiles} tiles": 2 * tiles.all_q_tiles,
        f"{tiles.all_kv_heads} heads of {tiles.kv_tiles} tiles of columns": blocks,
    }


def launches(
    spec: AttentionBackwardSpec, problem: AttentionBackwardProblem, device: DeviceLimits
) -> list[Launch]:
    """Three launches, in order. No extent may be 0: no tensor map describes an empty tensor.

    Tensors are named q, k, v, o, do, lse and dlse (fp32, contiguous; dlse is null where lse has no
    gradient), dq, dk, dv, for packed lengths cu_seqlens_q and cu_seqlens_k (int32), and the
    workspaces. The gradients of packed rows that are of no sequence become 0. The host scalars are
    `scale` and, where the kernel has one, `softcap`: both must be positive. Raises ProblemError for
    extents beyond 32 bits.
    """
    limits.refuse_beyond(_counted(spec, problem))
    operation, schedule = spec.operation, spec.schedule
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    tiles, values = _tiles(spec, problem), _values(spec, problem, device)

    def launch(suffix: str, grid: int, block: int, cluster: int, shared_bytes: int) -> Launch:
        return Launch(spec.name + suffix, grid, block, cluster, shared_bytes, values, early=True)

    return [
        launch("_preprocess", tiles.all_q_tiles, ROW_THREADS, 1, 0),
        launch(
            "",
            tiles.all_kv_tiles * layout.parts * schedule.cluster,
            schedule.threads,
            schedule.cluster_size,
            layout.shared_bytes,
        ),
        launch("_postprocess", tiles.all_q_tiles, ROW_THREADS, 1, 0),
    ]


def workspaces(spec: AttentionBackwardSpec, problem: AttentionBackwardProblem) -> list[Workspace]:
    """Lse and delta of every row, and the sums of dq in fp32, by whole q tiles.

    A deterministic kernel counts the kv tiles that added to each, and the blocks that have begun.
    """
    operation, schedule = spec.operation, spec.schedule
    tiles = _tiles(spec, problem).all_q_tiles
    rows = tiles * schedule.q_tile
    found = [
        Workspace("statistics", 2 * 4 * rows),
        Workspace("dq_sum", operation.dim * 4 * rows),
    ]
    if operation.deterministic:
        layout = attention_backward_layout(spec.architecture, operation, schedule)
        found += [
            Workspace("turns", 4 * tiles * layout.parts),
            Workspace("counter", 4),
        ]
    return found

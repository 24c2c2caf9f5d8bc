"""The backward at launch: its three launches and its workspaces."""

from __future__ import annotations

from warploom.generator.families._attention.problem import lengths_counted
from warploom.generator.families.attention_backward.layout import attention_backward_layout
from warploom.generator.families.attention_backward.parameters import AtLaunch, parameters
from warploom.generator.families.attention_backward.problem import (
    AttentionBackwardProblem,
    tiles_of,
)
from warploom.generator.families.attention_backward.schedule import AttentionBackwardSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.shapes import refuse_beyond

ROW_THREADS = 256  # of a block of the preprocess and postprocess kernels


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `refuse_beyond`."""
    schedule, tiles = at.schedule, at.tiles
    q_tile, kv_tile = schedule.tile
    blocks = tiles.all_kv_tiles * at.layout.parts * schedule.cluster
    return {
        **lengths_counted(at.problem, at.operation.mask, schedule.tile, packed=at.packed),
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

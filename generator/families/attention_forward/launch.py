"""Attention at launch: the problem, its launches and workspaces."""

from __future__ import annotations

from warploom.generator import limits
from warploom.generator.elements import element
from warploom.generator.families._attention.parameters import bound_values, length_values
from warploom.generator.families._attention.problem import (
    AttentionProblem,
    Strides,
    lengths_counted,
)
from warploom.generator.families._attention.tensor_map import tensor_map
from warploom.generator.families.attention_forward.layout import attention_layout
from warploom.generator.families.attention_forward.schedule import (
    AttentionSchedule,
    AttentionSpec,
)
from warploom.generator.launches import Address, Argument, DeviceLimits, Launch, Value, Workspace
from warploom.generator.tensor_maps import TensorMap
from warploom.generator.wgmma import WGMMA_M

# Of k and v that the tiles in flight are kept within: with q and o they then stay in 50 MB of L2.
SECTION_BYTES = 32 << 20


def q_tiles(schedule: AttentionSchedule, problem: AttentionProblem, *, packed: bool = False) -> int:
    """Tiles of one head; packed: as many as its sequences can need."""
    if packed:
        return problem.total_q // schedule.q_tile + problem.batch
    return -(-problem.seq_q // schedule.q_tile)


def _section(problem: AttentionProblem, all_heads: int) -> int:
    """Query heads whose k and v stay in L2 together: whole groups, at least one."""
    kv_head_bytes = 2 * problem.seq_k * problem.dim * 2
    kv_heads = max(1, SECTION_BYTES // kv_head_bytes)
    sharing = problem.heads // problem.kv_heads
    return min(kv_heads * sharing, all_heads)


def launches(spec: AttentionSpec, problem: AttentionProblem, device: DeviceLimits) -> list[Launch]:
    """One launch. No extent may be 0: no tensor map describes an empty tensor.

    Tensors are named q, k, v, o, lse (fp32, contiguous), for packed lengths cu_seqlens_q and
    cu_seqlens_k (int32), and the workspaces. The host scalars are `scale` and, where the kernel
    has one, `softcap`: both must be positive. Raises ProblemError for extents beyond 32 bits.
    """
    operation, schedule = spec.operation, spec.schedule
    packed = operation.lengths == "packed"
    layout = attention_layout(spec.architecture, operation, schedule)
    kind = element(operation.element)

    def mapped(name: str, strides: Strides, rows: int) -> TensorMap:
        box = layout.box_columns, rows
        return tensor_map(name, kind, problem, strides, box, layout.span, packed=packed)

    o_batch_stride, o_head_stride, o_row_stride = problem.strides_o
    per_head = q_tiles(schedule, problem, packed=packed)
    all_heads = problem.heads * (1 if packed else problem.batch)
    tiles = per_head * all_heads
    limits.refuse_beyond(
        {
            **lengths_counted(problem, operation.mask, schedule.tile, packed=packed),
            f"{per_head} tiles of {schedule.q_tile} rows": per_head * schedule.q_tile,
            # A section of them that begins past the last, and one of each block's in it.
            f"{all_heads} heads of {per_head} tiles": 2 * tiles + device.multiprocessors,
        }
    )
    values: dict[str, Value] = {
        "q_map": mapped("q", problem.strides_q, WGMMA_M),
        "k_map": mapped("k", problem.strides_k, schedule.kv_tile),
        "v_map": mapped("v", problem.strides_v, schedule.kv_tile),
        "o": Address("o"),
        "lse": Address("lse"),
        "o_batch_stride": o_batch_stride,
        "o_head_stride": o_head_stride,
        "o_row_stride": o_row_stride,
        "dim": problem.dim,
        "tiles": tiles,
        "q_tiles": per_head,
        "section": _section(problem, all_heads),
        "all_heads": all_heads,
        "sharing": problem.heads // problem.kv_heads,
        "scale": Argument("scale"),
        **length_values(problem, packed=packed),
        **bound_values(operation.mask, problem, packed=packed),
    }
    if operation.softcap:
        values["softcap"] = Argument("softcap")
    if schedule.scheduler == "dynamic":
        values["counter"] = Address("counter")
    return [
        Launch(
            entry=spec.name,
            grid=tiles if schedule.scheduler == "single" else min(tiles, device.multiprocessors),
            block=schedule.threads,
            cluster=1,
            shared_bytes=layout.shared_bytes,
            parameters=values,
            early=True,
        )
    ]


def workspaces(spec: AttentionSpec, problem: AttentionProblem) -> list[Workspace]:
    """The counter that a dynamic scheduler takes tiles from."""
    schedule = spec.schedule
    return [Workspace("counter", 4, kept=True)] if schedule.scheduler == "dynamic" else []

"""Attention at launch: the problem, its launches and workspaces."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator import limits
from warploom.generator.elements import element
from warploom.generator.families.attention_forward.layout import attention_layout
from warploom.generator.families.attention_forward.schedule import (
    WGMMA_M,
    AttentionSchedule,
    AttentionSpec,
)
from warploom.generator.launches import Address, Argument, DeviceLimits, Launch, Value, Workspace
from warploom.generator.tensor_maps import TensorMap

# A `left` or `right` that bounds nothing: beyond any sequence, and a row can be added to it.
UNBOUNDED = 1 << 30
# Of k and v that the tiles in flight are kept within: with q and o they then stay in 50 MB of L2.
SECTION_BYTES = 32 << 20

# Of packed maps: the steps that lead back around 2^64, since 2^30 times 2^34 is that.
BACK = 1 << 30

Strides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The extents of one call, and where its tensors lie: everything in elements.

    Strides are those of (batch, head, seq). Packed: `batch` counts sequences, `seq_q` and `seq_k`
    are the longest, `total_q` and `total_k` the packed extents (fixed: equal to seq_q and seq_k),
    and strides are (0, head, token). Row r attends to columns r - left to r + right: alignment is
    in these bounds already. Both lie in [-UNBOUNDED, UNBOUNDED], and UNBOUNDED is none.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    dim: int
    total_q: int
    total_k: int
    strides_q: Strides
    strides_k: Strides
    strides_v: Strides
    strides_o: Strides
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    bottom_right: bool = False  # packed: bounds move by seq_k - seq_q of each sequence


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


def length_values(problem: AttentionProblem, *, packed: bool) -> dict[str, Value]:
    """What both passes are told of lengths: FIXED or PACKED of parameters.py."""
    if packed:
        offsets: dict[str, Value]
        offsets = {name: Address(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        totals = {"total_q": problem.total_q, "total_k": problem.total_k}
        return {**offsets, "batch": problem.batch, **totals}
    return {"heads": problem.heads, "seq_q": problem.seq_q, "seq_k": problem.seq_k}


def bound_values(mask: str, problem: AttentionProblem, *, packed: bool) -> dict[str, Value]:
    """What both passes are told of the mask: `bounds` of parameters.py."""
    values: dict[str, Value] = {"left": problem.left} if mask == "window" else {}
    if mask != "none":
        values["right"] = problem.right
    if mask != "none" and packed:
        values["bottom_right"] = int(problem.bottom_right)
    return values


def lengths_counted(
    problem: AttentionProblem, mask: str, tile: tuple[int, int], *, packed: bool
) -> dict[str, int]:
    """The largest numbers that both passes reach in 32 bits: see `limits.refuse_beyond`.

    A row or column may be one of a tile's past the end, and stand beside a bound.
    """
    beside = sum(tile)
    if packed:  # coordinates count from BACK, and no bound of rows or columns is larger
        totals = {"total_q": problem.total_q, "total_k": problem.total_k}
        return {f"{name} {total}": BACK + total + beside for name, total in totals.items()}
    left = problem.left if mask == "window" else 0
    right = problem.right if mask != "none" else 0
    return {
        f"seq_q {problem.seq_q}": problem.seq_q + beside + max(right, -left, 0),
        f"seq_k {problem.seq_k}": problem.seq_k + beside + max(left, -right, 0),
    }


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

    def tensor_map(name: str, seq: int, heads: int, strides: Strides, rows: int) -> TensorMap:
        batch_stride, head_stride, seq_stride = (stride * kind.bytes for stride in strides)
        extents: tuple[int, ...] = (problem.dim, seq, heads, problem.batch)
        pitches: tuple[int, ...] = (seq_stride, head_stride, batch_stride)
        if packed:  # templates/_attention/lengths_packed.cuh says why
            extents = (problem.dim, rows, heads, BACK - rows + seq + 1, BACK + 1)
            pitches = (seq_stride, head_stride, seq_stride, 2**34 - seq_stride)
        return TensorMap(
            tensor=name,
            element=kind,
            extents=extents,
            pitches=pitches,
            box=(layout.box_columns, rows, *(1 for _ in extents[2:])),
            span=layout.span,
        )

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
    rows, columns, kv_heads = problem.total_q, problem.total_k, problem.kv_heads
    values: dict[str, Value] = {
        "q_map": tensor_map("q", rows, problem.heads, problem.strides_q, WGMMA_M),
        "k_map": tensor_map("k", columns, kv_heads, problem.strides_k, schedule.kv_tile),
        "v_map": tensor_map("v", columns, kv_heads, problem.strides_v, schedule.kv_tile),
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
        "sharing": problem.heads // kv_heads,
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

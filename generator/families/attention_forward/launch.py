"""Attention at launch: its parameter block, launches and workspaces."""

from __future__ import annotations

from functools import cached_property, lru_cache

from warploom.generator.elements import element
from warploom.generator.families._attention import launch
from warploom.generator.families._attention.launch import SCALE, SHARING, bounds, lengths
from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.families.attention_forward.layout import AttentionLayout, attention_layout
from warploom.generator.families.attention_forward.rules import KEYS_OF_A_SCALE
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
    AttentionSpec,
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

# Of k and v that the tiles in flight are kept within: with q and o they then stay in 50 MB of L2.
_L2_BYTES = 32 << 20
# Where tiles are dealt in advance, each section is by itself, and what its last round leaves idle
# is lost: sections of fewer rounds grow until that is at most this share of all. (Four heads of 256
# rows over 12,506 columns, which _L2_BYTES allow, are 8 tiles, which leave most of an H200 idle:
# 688 us, and 185 with a counter.)
_IDLE, _ROUNDS = 0.1, 2


class AtLaunch(launch.AtLaunch[AttentionOperation, AttentionSchedule, AttentionProblem]):
    """What an attention kernel's parameters are functions of."""

    @cached_property
    def layout(self) -> AttentionLayout:
        """Where everything of one block lies."""
        return attention_layout(self.spec.architecture, self.operation, self.schedule)

    @property
    def q_tiles(self) -> int:
        """Tiles of one head; packed: as many as its sequences can need."""
        problem, tile = self.problem, self.schedule.q_tile
        return problem.total_q // tile + problem.batch if self.packed else -(-problem.seq_q // tile)

    @property
    def all_heads(self) -> int:
        """Heads of all batches."""
        return self.problem.heads * (1 if self.packed else self.problem.batch)

    @property
    def tiles(self) -> int:
        """Tiles of all heads."""
        return self.q_tiles * self.all_heads

    @property
    def lists(self) -> int:
        """Lists of one head: of every tile."""
        return self.q_tiles

    @property
    def list_tiles(self) -> int:
        """Tiles that a list has room for: of keys of one head."""
        return -(-self.problem.seq_k // self.schedule.kv_tile)

    @property
    def values_map(self) -> TensorMap:
        """The map of v: rows of a kv tile or, of 8 bits, keys of one for all of the dimension."""
        problem = self.problem
        if self.operation.weights == "same":
            return self.tensor_map("v", self.schedule.kv_tile)
        keys = problem.total_k
        if self.packed:
            keys = padded_total(keys, problem.batch)
        batch_stride, head_stride, dim_stride = problem.strides_v
        return TensorMap(
            tensor="v",
            element=self.operation.element_of("v"),
            extents=(
                -(-keys // 16) * 16,
                problem.dim,
                problem.kv_heads,
                1 if self.packed else problem.batch,
            ),
            pitches=(dim_stride, head_stride, batch_stride),
            box=(self.layout.v_span, self.operation.dim, 1, 1),
            span=self.layout.v_span,
        )

    @property
    def section(self) -> int:
        """Query heads whose k and v stay in L2 together."""
        problem, blocks = self.problem, min(self.tiles, self.device.multiprocessors)
        dealt = self.schedule.scheduler == "static" and self.operation.mask != "none"
        sharing = problem.heads // problem.kv_heads
        kv_head_bytes = 2 * problem.seq_k * (problem.dim + (problem.dim_v or problem.dim))
        return section_of(kv_head_bytes, sharing, self.q_tiles, self.all_heads, blocks, dealt=dealt)


def section_of(
    kv_head_bytes: int, sharing: int, q_tiles: int, all_heads: int, blocks: int, *, dealt: bool
) -> int:
    """Return the query heads of a section: whole groups of `sharing`, of `q_tiles` each.

    dealt   to `blocks` in advance: then as many more as leave few of these idle
    """
    least = min(max(1, _L2_BYTES // kv_head_bytes) * sharing, all_heads)
    # Of several rounds the last has the shortest tiles, and every second section idles elsewhere.
    if not dealt or least * q_tiles >= _ROUNDS * blocks:
        return least

    def idle(heads: int) -> float:
        whole, rest = divmod(all_heads, heads)
        rounds = whole * -(-heads * q_tiles // blocks) - (-rest * q_tiles // blocks)
        return rounds * blocks / (all_heads * q_tiles) - 1

    most = min(all_heads, least + int(blocks / _IDLE / q_tiles) + 2 * sharing)
    tried: list[int] = [*range(least, most, sharing), all_heads]
    for heads in tried:
        if idle(heads) <= _IDLE:
            return heads
    return min(tried, key=idle)


def padded_total(total_k: int, sequences: int) -> int:
    """Keys of a dim-major v of packed sequences, each of which begins at a multiple of 128.

    Sequence i begins at cu_seqlens[i] + 127 i, rounded down.
    """
    return (total_k + sequences * (KEYS_OF_A_SCALE - 1)) // KEYS_OF_A_SCALE * KEYS_OF_A_SCALE


_EVERY: tuple[Field[AtLaunch], ...] = (
    int64("o_batch_stride", "elements", lambda at: at.problem.strides_o[0]),
    int64("o_head_stride", "elements", lambda at: at.problem.strides_o[1]),
    int64("o_row_stride", "elements", lambda at: at.problem.strides_o[2]),
    int32("dim", "of a head; at most kDim", lambda at: at.problem.dim_v or at.problem.dim),
    int32("tiles", "of all heads and batches", lambda at: at.tiles),
    int32("q_tiles", "of one head", lambda at: at.q_tiles),
    int32("section", "heads whose tiles are processed together", lambda at: at.section),
    int32("all_heads", "of all batches", lambda at: at.all_heads),
    SHARING,
    SCALE,
)
_SCALES: tuple[Field[AtLaunch], ...] = (
    pointer("q_descale", "const float", "what q is multiplied by"),
    pointer("k_descale", "const float", "what k is"),
    int64("q_descale_batch", "elements", lambda at: at.problem.strides_q_descale[0]),
    int64("q_descale_head", "elements", lambda at: at.problem.strides_q_descale[1]),
    int64("k_descale_batch", "elements", lambda at: at.problem.strides_k_descale[0]),
    int64("k_descale_head", "elements", lambda at: at.problem.strides_k_descale[1]),
)
_VALUES_SCALE: tuple[Field[AtLaunch], ...] = (
    pointer("v_descale", "const float", "what v is"),
    int64("v_descale_batch", "elements", lambda at: at.problem.strides_v_descale[0]),
    int64("v_descale_head", "elements", lambda at: at.problem.strides_v_descale[1]),
)
_BLOCKS: tuple[Field[AtLaunch], ...] = (
    int64("q_descale_row", "elements", lambda at: at.problem.strides_q_descale[2]),
    int64("k_descale_block", "elements, of 128 keys", lambda at: at.problem.strides_k_descale[2]),
    int32("q_descale_sharing", "query heads of one scale", lambda at: at.problem.q_descale_sharing),
)
_COUNTER = pointer("counter", "uint32_t", "tiles taken so far; 0 between launches")


def _maps(dimensions: str) -> tuple[Field[AtLaunch], ...]:
    q, kv = f"{dimensions}, by 64 rows", f"{dimensions}, by a kv tile"
    return (
        tensor_map("q_map", q, lambda at: at.tensor_map("q", WGMMA_M)),
        tensor_map("k_map", kv, lambda at: at.tensor_map("k", at.schedule.kv_tile)),
        tensor_map("v_map", kv, lambda at: at.values_map),
    )


@lru_cache(maxsize=1024)  # each is wanted by launches, and where these are bound
def parameters(spec: AttentionSpec) -> ParameterBlock[AtLaunch]:
    """The kernel's parameter block."""
    operation, schedule = spec.operation, spec.schedule
    packed = operation.lengths == "packed"
    fields: list[Field[AtLaunch]] = [
        *_maps("[dim, row, head, first]" if packed else "[dim, seq, head, batch]"),
        pointer("o", element(operation.element).cpp, "as q, but for its strides"),
        *lengths(packed=packed),
        *_EVERY,
    ]
    fields += [field for modifier in operation.modifiers for field in modifier.parameters()]
    fields += [field for modifier in operation.modifiers for field in modifier.weight_parameters()]
    fields += _SCALES if operation.eight else ()
    fields += _VALUES_SCALE if operation.weights != "same" else ()
    fields += _BLOCKS if operation.scales == "blocks" else ()
    if schedule.scheduler == "dynamic":
        fields.append(_COUNTER)
    for modifier in operation.modifiers:
        fields += modifier.tile_parameters("int4", "int32_t", "row, 32 columns")
    return block([*fields, *bounds(operation.mask, packed=packed)])


# ---- Launches and workspaces ---------------------------------------------------------------------

KEYS_THREADS = 256  # of a block that reads a row of a mask of keys


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `refuse_beyond`."""
    schedule = at.schedule
    return {
        **at.lengths_counted(schedule.tile),
        f"{at.q_tiles} tiles of {schedule.q_tile} rows": at.q_tiles * schedule.q_tile,
        # A section of them that begins past the last, and one of each block's in it.
        f"{at.all_heads} heads of {at.q_tiles} tiles": 2 * at.tiles + at.device.multiprocessors,
    }


def launches(spec: AttentionSpec, problem: AttentionProblem, device: DeviceLimits) -> list[Launch]:
    """One launch, and one before it where a mask is of keys.

    No extent may be 0: no tensor map describes an empty tensor.
    Tensors are named q, k, v, o, lse (fp32, contiguous), for packed lengths cu_seqlens_q and
    cu_seqlens_k (int32), the tensors of its modifiers, and the workspaces. The host scalars are
    `scale`, which must be positive, and those of its modifiers. Raises ProblemError for extents
    beyond 32 bits.
    """
    at, schedule = AtLaunch(spec, problem, device), spec.schedule
    refuse_beyond(_counted(at))
    single, values = schedule.scheduler == "single", parameters(spec).values(at)
    main = Launch(
        entry=spec.name,
        grid=at.tiles if single else min(at.tiles, device.multiprocessors),
        block=schedule.threads,
        cluster=1,
        shared_bytes=at.layout.shared_bytes,
        parameters=values,
        early=True,
    )
    rows = sum(modifier.key_rows(problem) for modifier in spec.operation.modifiers)
    if not rows:
        return [main]
    return [Launch(f"{spec.name}_keys", rows, KEYS_THREADS, 1, 0, values, early=True), main]


def workspaces(spec: AttentionSpec, problem: AttentionProblem) -> list[Workspace]:
    """The counter that a dynamic scheduler takes tiles from, and what rows of a mask show."""
    found = []
    if spec.schedule.scheduler == "dynamic":
        found.append(Workspace("counter", 4, kept=True))
    modifiers = spec.operation.modifiers
    return [*found, *(one for modifier in modifiers for one in modifier.workspaces(problem))]

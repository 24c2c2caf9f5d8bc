"""The parameter block of an attention kernel: what every kernel reads, then what only some do."""

from __future__ import annotations

from functools import cached_property

from warploom.generator.elements import element
from warploom.generator.families._attention import launch
from warploom.generator.families._attention.parameters import (
    SCALE,
    SHARING,
    bounds,
    lengths,
)
from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.families.attention_forward.layout import AttentionLayout, attention_layout
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
    AttentionSpec,
)
from warploom.generator.families.attention_forward.section import section_of
from warploom.generator.parameters import (
    Field,
    ParameterBlock,
    block,
    int32,
    int64,
    pointer,
    tensor_map,
)
from warploom.generator.wgmma import WGMMA_M


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
    def section(self) -> int:
        """Query heads whose k and v stay in L2 together."""
        problem, blocks = self.problem, min(self.tiles, self.device.multiprocessors)
        dealt = self.schedule.scheduler == "static" and self.operation.mask != "none"
        sharing, kv_head_bytes = problem.heads // problem.kv_heads, 4 * problem.seq_k * problem.dim
        return section_of(kv_head_bytes, sharing, self.q_tiles, self.all_heads, blocks, dealt=dealt)


_EVERY: tuple[Field[AtLaunch], ...] = (
    int64("o_batch_stride", "elements", lambda at: at.problem.strides_o[0]),
    int64("o_head_stride", "elements", lambda at: at.problem.strides_o[1]),
    int64("o_row_stride", "elements", lambda at: at.problem.strides_o[2]),
    int32("dim", "of a head; at most kDim", lambda at: at.problem.dim),
    int32("tiles", "of all heads and batches", lambda at: at.tiles),
    int32("q_tiles", "of one head", lambda at: at.q_tiles),
    int32("section", "heads whose tiles are worked off together", lambda at: at.section),
    int32("all_heads", "of all batches", lambda at: at.all_heads),
    SHARING,
    SCALE,
)
_COUNTER = pointer("counter", "uint32_t", "tiles taken so far; 0 between launches")


def _maps(dimensions: str) -> tuple[Field[AtLaunch], ...]:
    q, kv = f"{dimensions}, by 64 rows", f"{dimensions}, by a kv tile"
    return (
        tensor_map("q_map", q, lambda at: at.tensor_map("q", WGMMA_M)),
        tensor_map("k_map", kv, lambda at: at.tensor_map("k", at.schedule.kv_tile)),
        tensor_map("v_map", kv, lambda at: at.tensor_map("v", at.schedule.kv_tile)),
    )


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
    if schedule.scheduler == "dynamic":
        fields.append(_COUNTER)
    for modifier in operation.modifiers:
        fields += modifier.tile_parameters("int4", "int32_t", "row, 32 columns")
    return block([*fields, *bounds(operation.mask, packed=packed)])

"""The parameter block of an attention kernel: what it reads beside the tensors."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families._attention.parameters import FIXED, PACKED, SOFTCAP, bounds
from warploom.generator.families.attention_forward.schedule import (
    AttentionSpec,
)
from warploom.generator.parameters import Field, Kind, ParameterBlock, block

_EVERY = (
    Field("o_batch_stride", Kind.INT64, "int64_t", "elements"),
    Field("o_head_stride", Kind.INT64, "int64_t", "elements"),
    Field("o_row_stride", Kind.INT64, "int64_t", "elements"),
    Field("dim", Kind.INT32, "int32_t", "of a head; at most kDim"),
    Field("tiles", Kind.INT32, "int32_t", "of all heads and batches"),
    Field("q_tiles", Kind.INT32, "int32_t", "of one head"),
    Field("section", Kind.INT32, "int32_t", "heads whose tiles are worked off together"),
    Field("all_heads", Kind.INT32, "int32_t", "of all batches"),
    Field("sharing", Kind.INT32, "int32_t", "query heads of one kv head"),
    Field("scale", Kind.FLOAT, "float", "of the products"),
)
_COUNTER = Field("counter", Kind.POINTER, "uint32_t", "tiles taken so far; 0 between launches")


def _maps(dimensions: str) -> tuple[Field, ...]:
    boxes = {"q": "64 rows", "k": "a kv tile", "v": "a kv tile"}
    return tuple(
        Field(f"{name}_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", f"{dimensions}, by {box}")
        for name, box in boxes.items()
    )


def parameters(spec: AttentionSpec) -> ParameterBlock:
    """The kernel's parameter block: what every kernel reads, then what only some do."""
    operation, schedule = spec.operation, spec.schedule
    packed = operation.lengths == "packed"
    maps = _maps("[dim, row, head, first]" if packed else "[dim, seq, head, batch]")
    o = Field("o", Kind.POINTER, element(operation.element).cpp, "as q, but for its strides")
    fields = [*maps, o, *(PACKED if packed else FIXED), *_EVERY]
    if operation.softcap:
        fields.append(SOFTCAP)
    if schedule.scheduler == "dynamic":
        fields.append(_COUNTER)
    return block(fields + bounds(operation.mask, packed=packed))

"""The parameter block of the backward's kernels: all three entries read the same."""

from __future__ import annotations

from warploom.generator.families._attention.parameters import FIXED, PACKED, SOFTCAP, bounds
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardSpec,
)
from warploom.generator.parameters import Field, Kind, ParameterBlock, block

_BOXES = {
    "q": "a q tile", "k": "rows of a block", "v": "rows of a block", "do": "a q tile"
}  # fmt: skip
_GRADIENT_BOXES = {"dk": "64 rows", "dv": "64 rows"}
_EVERY = (
    Field("dlse", Kind.POINTER, "float", "the gradient of lse, laid out as it is; may be null"),
    Field("statistics", Kind.POINTER, "float", "[head, q tile, 2, row]: lse in base 2, delta"),
    Field("dq_sum", Kind.POINTER, "float", "[head, q tile, ...]: dq, as accumulators lie"),
    Field("kv_tiles", Kind.INT32, "int32_t", "of one head"),
    Field("q_tiles", Kind.INT32, "int32_t", "of one head"),
    Field("section", Kind.INT32, "int32_t", "kv heads whose tiles are worked off together"),
    Field("all_kv_heads", Kind.INT32, "int32_t", "of all batches"),
    Field("sharing", Kind.INT32, "int32_t", "query heads of one kv head"),
    Field("dim", Kind.INT32, "int32_t", "of the tensors, at most kDim"),
    Field("scale", Kind.FLOAT, "float", "of the products"),
)
_ORDERED = (
    Field("turns", Kind.POINTER, "int32_t", "[head, q tile, part]: kv tiles that added to dq"),
    Field("counter", Kind.POINTER, "int32_t", "of tickets that blocks of main have taken"),
    Field("leftward", Kind.INT32, "int32_t", "whether kv tiles add to dq from right to left"),
)


def _rows(name: str) -> tuple[Field, ...]:
    """A tensor that is read or written without TMA."""
    return (
        Field(f"{name}_rows", Kind.POINTER, "Element", f"{name}, by the strides below"),
        *(
            Field(f"{name}_{axis}", Kind.INT64, "int64_t", f"stride of {name}, in elements")
            for axis in ("batch", "head", "seq")
        ),
    )


def parameters(spec: AttentionBackwardSpec) -> ParameterBlock:
    """The parameter block: what every kernel reads, then what only some do."""
    operation, schedule = spec.operation, spec.schedule
    packed, alone = operation.lengths == "packed", schedule.cluster == 1
    dimensions = "[dim, row, head, first]" if packed else "[dim, seq, head, batch]"
    fields = [
        *(
            Field(f"{name}_map", Kind.TENSOR_MAP, "cute::TmaDescriptor", f"{dimensions}, by {box}")
            for name, box in (_BOXES | (_GRADIENT_BOXES if alone else {})).items()
        ),
        Field(
            "statistics_map",
            Kind.TENSOR_MAP,
            "cute::TmaDescriptor",
            "[row, lse or delta of q tiles], by a q tile",
        ),
        *(PACKED if packed else FIXED),
        *_EVERY,
        *(field for name in ("o", "do", "dq") for field in _rows(name)),
    ]
    if not alone:
        fields += [*_rows("dk"), *_rows("dv")]
    if operation.deterministic:
        fields += _ORDERED
    if operation.softcap:
        fields.append(SOFTCAP)
    return block(fields + bounds(operation.mask, packed=packed))

"""What the decode template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._attention import template as modifiers
from warploom.generator.families.attention_decode import work
from warploom.generator.families.attention_decode.header import described
from warploom.generator.families.attention_decode.layout import decode_layout
from warploom.generator.families.attention_decode.schedule import WARP_ROWS, DecodeSpec

COMBINE_REGISTERS = 250  # of a thread that adds up eight parts of four rows at a time
SPARE_REGISTERS = 32  # that are left beside what it expects to need else: else kernels spilled


def _chunked(spec: DecodeSpec) -> bool:
    """Whether items are cut by their own lengths; a cluster has whole ones."""
    return spec.operation.batch_invariant and spec.schedule.cluster == 1


def _room(spec: DecodeSpec) -> bool:
    """Whether a thread has registers for eight parts of four rows."""
    layout = decode_layout(spec.operation, spec.schedule)
    room = layout.register_budget >= COMBINE_REGISTERS
    return room and layout.registers + SPARE_REGISTERS <= layout.register_budget


def _combined(spec: DecodeSpec) -> str:
    if _chunked(spec) and _room(spec):
        return "chunks"
    # Of 32 rows of one sequence by 8192 keys an H200 took 20.1 us with more loads on their way, and
    # 23.1 without. Few rows have few loads, and a longer text costs them up to 0.8 us.
    rows = _room(spec) and spec.schedule.rows > WARP_ROWS
    return "rows" if rows else "few"


def context(spec: DecodeSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    kind = element(operation.element)
    shared = modifiers.context(operation.modifiers)
    return {
        **shared,
        "parts": [*shared["parts"], *_parts(spec)],
        "header": described(spec, decode_layout(operation, schedule)),
        "element": kind,
        "kv": operation.kv,
        "ptx_type": {"fp16": "f16", "bf16": "bf16"}[kind.name],
        "decode_part": "same" if operation.cache == "same" else f"{operation.cache}_{kind.name}",
        "fragments_part": "same" if operation.cache == "same" else "bytes",
        "combine_part": _combined(spec),
        "chunked": _chunked(spec),
        "adds": _combined(spec) == "chunks",  # a block its chunks to those before
        "lifted": operation.cache == "e4m3" and kind.name == "bf16",
        "first_key": "start" if operation.starts else "0",
        "bounds_left": operation.mask == "window" or operation.starts,
        "bounds_right": operation.mask != "none",
        "chunks": work.chunks_of(operation, schedule),
        "few_chunks": work.FEW_CHUNKS,
        "most_chunks": work.MOST_CHUNKS,
    }


def _parts(spec: DecodeSpec) -> list[str]:
    """Return the files of this family's options, in the order in which hooks include them."""
    operation, schedule = spec.operation, spec.schedule
    chunked, clusters, merged = _chunked(spec), schedule.cluster > 1, _combined(spec)
    varlen_keys = operation.keys == "packed" and not operation.page
    applies = {
        f"merge_{merged}": not clusters,
        "merge_wide": not clusters and merged != "few",
        "items_in_chunks": chunked,
        "items_in_ranges": not chunked and not clusters,
        "items_of_clusters": clusters,
        "queries_varlen": operation.queries == "packed",
        "queries_padded": operation.queries != "packed",
        "keys_paged": operation.page > 0,
        "keys_varlen": varlen_keys,
        "keys_padded": not varlen_keys and not operation.page,
        "lengths": operation.lengths,
        "starts": operation.starts,
        "token_scales": operation.scales == "token",
    }
    return modifiers.options("attention_decode", applies)

"""What the decode template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.attention_decode import work
from warploom.generator.families.attention_decode.schedule import DecodeSpec


def context(spec: DecodeSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    kind = element(operation.element)
    return {
        "element": kind,
        "kv": operation.kv,
        "ptx_type": {"fp16": "f16", "bf16": "bf16"}[kind.name],
        "decode_part": "same" if operation.cache == "same" else f"{operation.cache}_{kind.name}",
        "fragments_part": "same" if operation.cache == "same" else "bytes",
        "lifted": operation.cache == "e4m3" and kind.name == "bf16",
        "first_key": "start" if operation.starts else "0",
        "bounds_left": operation.mask == "window" or operation.starts,
        "bounds_right": operation.mask != "none",
        "least_tiles": work.least_tiles(schedule),
        "most_chunks": work.MOST_CHUNKS,
    }

"""An attention kernel's procedural name, read back."""

from __future__ import annotations

import re
from typing import Any

from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
    AttentionSpec,
)
from warploom.generator.specification import NUMBER, KernelSpec

_NAME = re.compile(
    r"attention_forward_(?P<arch>{arch})_(?P<element>fp16|bf16)_dim(?P<dim>{number})"
    r"_(?P<mask>none|causal|window)(?P<softcap>_softcap)?_(?P<lengths>fixed|packed)"
    r"_(?P<q_tile>{number})x(?P<kv_tile>{number})_stages(?P<stages>{number})(?P<overlap>_overlap)?"
    r"(?P<pingpong>_pingpong)?_(?P<scheduler>single|static|dynamic)"
    r"(?P<rescale>_rescale_needed)?_[0-9a-f]{{8}}".format(
        arch="|".join(row.token for row in ARCHITECTURES.values()), number=NUMBER
    )
)


def parse_name(name: str) -> AttentionSpec | None:
    """Return the spec with the fields that `name` shows, or None when it is not of this family."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    token: dict[str, Any] = match.groupdict()
    arch = next(row.name for row in ARCHITECTURES.values() if row.token == token["arch"])
    operation: dict[str, Any] = {
        **{field: token[field] for field in ("element", "mask", "lengths")},
        "dim": int(token["dim"]),
        "softcap": token["softcap"] is not None,
    }
    schedule: dict[str, Any] = {
        **{field: int(token[field]) for field in ("q_tile", "kv_tile", "stages")},
        **{field: token[field] is not None for field in ("overlap", "pingpong")},
        "scheduler": token["scheduler"],
        "rescale": "needed" if token["rescale"] else "always",
    }
    return KernelSpec(arch, AttentionOperation(**operation), AttentionSchedule(**schedule))

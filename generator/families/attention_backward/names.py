"""A backward kernel's procedural name, read back."""

from __future__ import annotations

import re
from typing import Any

from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
    AttentionBackwardSpec,
)
from warploom.generator.specification import NUMBER, KernelSpec

_NAME = re.compile(
    r"attention_backward_(?P<arch>{arch})_(?P<element>fp16|bf16)_dim(?P<dim>{number})"
    r"_(?P<mask>none|causal|window)(?P<softcap>_softcap)?_(?P<lengths>fixed|packed)"
    r"(?P<deterministic>_deterministic)?_(?P<q_tile>{number})x(?P<kv_tile>{number})"
    r"_stages(?P<stages>{number})(?P<single_do>_single_do)?(?:_cluster(?P<cluster>{number}))?"
    r"(?:_(?P<share>rows))?(?P<overlap>_overlap)?(?:_held_(?P<held>half|all))?"
    r"_(?P<accumulate>bulk|direct)_[0-9a-f]{{8}}".format(
        arch="|".join(row.token for row in ARCHITECTURES.values()), number=NUMBER
    )
)


def parse_name(name: str) -> AttentionBackwardSpec | None:
    """Return the spec with the fields that `name` shows, or None when it is not of this family."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    token: dict[str, Any] = match.groupdict()
    arch = next(row.name for row in ARCHITECTURES.values() if row.token == token["arch"])
    operation: dict[str, Any] = {
        **{field: token[field] for field in ("element", "mask", "lengths")},
        "dim": int(token["dim"]),
        **{field: token[field] is not None for field in ("softcap", "deterministic")},
    }
    schedule: dict[str, Any] = {
        **{field: int(token[field]) for field in ("q_tile", "kv_tile", "stages")},
        "overlap": token["overlap"] is not None,
        "accumulate": token["accumulate"],
        "cluster": int(token["cluster"] or 1),
        "share": token["share"] or "columns",
        "single_do": token["single_do"] is not None,
        "held": token["held"] or "none",
    }
    return KernelSpec(
        arch, AttentionBackwardOperation(**operation), AttentionBackwardSchedule(**schedule)
    )

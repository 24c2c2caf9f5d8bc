"""A GEMM's procedural name, read back."""

from __future__ import annotations

import re
from typing import Any

from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.epilogue import STEPS
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec

_WORDS = {
    "arch": "|".join(row.token for row in ARCHITECTURES.values()),
    "a": "fp16|bf16|e4m3|e5m2|int8",
    "d": "fp16|bf16|fp32|int32",
    "layout": "row|col",
    "step": "|".join(sorted((step.token for step in STEPS), key=len, reverse=True)),
}
_NAME = re.compile(
    r"gemm_(?P<arch>{arch})_(?P<a>{a})_(?P<b>{a})_(?P<d>{d})_(?P<layout_a>{layout})"
    r"_(?P<layout_b>{layout})(?P<epilogue>(?:_(?:{step}))*)_(?P<roles>cooperative|pingpong)"
    r"_(?P<tile>\d+x\d+x\d+)_cluster(?P<cluster>\d+x\d+)_consumers(?P<consumers>\d)"
    r"_stages(?P<stages>\d+)_(?P<raster>along_[mn])_group(?P<group>\d+)_(?P<store>tma|direct)"
    r"_[0-9a-f]{{8}}".format(**_WORDS)
)
_STEP = re.compile(rf"_({_WORDS['step']})")


def parse_name(name: str) -> KernelSpec | None:
    """Return the spec with the fields that `name` shows, or None when it is no GEMM's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    token: dict[str, Any] = match.groupdict()
    by_token = {step.token: step for step in STEPS}
    arch = next(row.name for row in ARCHITECTURES.values() if row.token == token["arch"])
    operation = GemmOperation(
        **{field: token[field] for field in ("a", "b", "d", "layout_a", "layout_b")},
        epilogue=tuple(by_token[word] for word in _STEP.findall(token["epilogue"])),
    )
    fields: dict[str, Any] = {
        **{field: token[field] for field in ("raster", "store", "roles")},
        **{field: int(token[field]) for field in ("stages", "consumers", "group")},
        **{field: tuple(map(int, token[field].split("x"))) for field in ("tile", "cluster")},
    }
    return KernelSpec(arch, operation, GemmSchedule(**fields))

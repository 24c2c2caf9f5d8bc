"""A GEMM's procedural name, read back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args

from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.epilogue import STEPS
from warploom.generator.families.gemm.schedule import (
    Accumulation,
    GemmOperation,
    GemmSchedule,
    GemmSpec,
    Input,
    Layout,
    Output,
    Raster,
    Roles,
    Store,
)
from warploom.generator.specification import NUMBER, KernelSpec


def _either(words: Iterable[str]) -> str:
    """A pattern of any of the words, the longest first where one begins another."""
    return "|".join(sorted(words, key=len, reverse=True))


_WORDS = {
    "arch": _either(row.token for row in ARCHITECTURES.values()),
    "input": _either(get_args(Input)),
    "output": _either(get_args(Output)),
    "layout": _either(get_args(Layout)),
    "accumulation": _either(get_args(Accumulation)),
    "step": _either(step.token for step in STEPS),
    "roles": _either(get_args(Roles)),
    "raster": _either(get_args(Raster)),
    "store": _either(get_args(Store)),
    "number": NUMBER,
}
_NAME = re.compile(
    r"gemm_(?P<arch>{arch})_(?P<a>{input})_(?P<b>{input})_(?P<d>{output})"
    r"_(?P<layout_a>{layout})_(?P<layout_b>{layout})"
    r"(?:_(?P<accumulation>{accumulation}))?(?P<batched>_batched)?(?P<epilogue>(?:_(?:{step}))*)"
    r"_(?P<roles>{roles})_(?P<tile>{number}x{number}x{number})"
    r"_cluster(?P<cluster>{number}x{number})_consumers(?P<consumers>{number})_stages(?P<stages>{number})_(?P<raster>{raster})"
    r"_group(?P<group>{number})_(?P<store>{store})(?P<swap>_swap)?"
    r"(?:_producer(?P<producer_registers>{number}))?(?:_l2x(?P<l2_promotion>{number}))?"
    r"(?:_split(?P<split>{number}))?_[0-9a-f]{{8}}".format(**_WORDS)
)
_STEP = re.compile(rf"_({_WORDS['step']})")


def parse_name(name: str) -> GemmSpec | None:
    """Return the spec with the fields that `name` shows, or None when it is no GEMM's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    token: dict[str, Any] = match.groupdict()
    by_token = {step.token: step for step in STEPS}
    arch = next(row.name for row in ARCHITECTURES.values() if row.token == token["arch"])
    operation = GemmOperation(
        **{field: token[field] for field in ("a", "b", "d", "layout_a", "layout_b")},
        accumulation=token["accumulation"] or "fast",
        batched=token["batched"] is not None,
        epilogue=tuple(by_token[word] for word in _STEP.findall(token["epilogue"])),
    )
    fields: dict[str, Any] = {
        **{field: token[field] for field in ("raster", "store", "roles")},
        **{field: int(token[field]) for field in ("stages", "consumers", "group")},
        **{
            field: int(token[field])
            for field in ("producer_registers", "l2_promotion", "split")
            if token[field]
        },
        "swap": token["swap"] is not None,
        **{field: tuple(map(int, token[field].split("x"))) for field in ("tile", "cluster")},
    }
    return KernelSpec(arch, operation, GemmSchedule(**fields))

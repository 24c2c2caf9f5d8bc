"""New keys and values written into caches: rotated and quantised on their way, queries rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.attention_append.schedule import (
    VALUES,
    AttentionAppendOperation,
    AttentionAppendProblem,
    AttentionAppendSchedule,
    AttentionAppendShape,
    AttentionAppendSpec,
)
from warploom.generator.families.base import Family
from warploom.generator.models import Model

__all__ = [
    "FAMILY",
    "AttentionAppendOperation",
    "AttentionAppendProblem",
    "AttentionAppendSchedule",
    "AttentionAppendShape",
]


class AttentionAppend(
    Family[
        AttentionAppendOperation,
        AttentionAppendSchedule,
        AttentionAppendShape,
        AttentionAppendProblem,
    ]
):
    """Keys and values appended to caches."""

    def of_model(
        self, operation: AttentionAppendOperation, model: Model
    ) -> list[AttentionAppendOperation]:
        """In the model's type, of its heads' dimension."""
        return [replace(operation, element=model.element, dim=model.dim)]

    def context(self, spec: AttentionAppendSpec) -> dict[str, Any]:
        """The element types, and the sizes that follow from the operation."""
        operation: AttentionAppendOperation = spec.operation
        return {
            "parts": _options(operation),
            "element": element(operation.element),
            "cached": element(operation.cached),
            "angle": element(operation.angle),
            "values": VALUES,
            "lanes": operation.lanes,
            "largest": {"e4m3": "448.f", "int8": "127.f"}.get(operation.cache, ""),
        }


def _options(operation: AttentionAppendOperation) -> list[str]:
    """The files of a kernel's options, in the order in which hooks include them."""
    rotates = operation.rotary != "none"
    applies = {
        "cached_bytes": operation.cache != "same",
        "rotary": rotates,
        "whole_rows": not rotates,
        "tokens_varlen": operation.packed,
        "tokens_padded": not operation.packed,
        "queries": operation.queries,
        "keys_alone": not operation.queries,
        "cache_paged": operation.paged,
        "cache_contiguous": not operation.paged,
        "scaled_by_head": operation.scales == "head",
        "scaled_by_token": operation.scales == "token",
    }
    return [f"attention_append/{name}.cuh.jinja" for name, has in applies.items() if has]


FAMILY = AttentionAppend()

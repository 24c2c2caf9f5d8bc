"""Attention of few query rows to long keys, in caches that are contiguous, packed or paged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.generator.families._attention.modifiers import DECODED
from warploom.generator.families.attention_decode.layout import DecodeLayout, decode_layout
from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.problem import DecodeProblem, DecodeShape
from warploom.generator.families.attention_decode.schedule import DecodeSchedule, DecodeSpec
from warploom.generator.families.base import Family
from warploom.generator.models import Model

__all__ = ["FAMILY", "DecodeOperation", "DecodeProblem", "DecodeSchedule", "DecodeShape"]


class AttentionDecode(Family[DecodeOperation, DecodeSchedule, DecodeShape, DecodeProblem]):
    """Decoding: each sequence's few new rows attend to all of its keys."""

    def of_model(self, operation: DecodeOperation, model: Model) -> list[DecodeOperation]:
        """In the model's type, of its heads' dimension; with its window, and without one.

        A cache that keeps no more than the window is attended to without one.
        """
        fields: dict[str, Any] = {"element": model.element, "dim": model.dim}
        for kind in DECODED:
            fields |= kind.of_model(model)
        own = replace(operation, **fields)
        return [own, replace(own, mask="window")] if model.window else [own]

    def layout(self, spec: DecodeSpec) -> DecodeLayout:
        """Shared memory and registers: see layout.py."""
        return decode_layout(spec.operation, spec.schedule)


FAMILY = AttentionDecode()

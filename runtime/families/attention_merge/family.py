"""Merging, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from typing import Any

from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeShape,
)
from warploom.runtime.call import Call
from warploom.runtime.families.attention_merge.api import attention_merge
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.trial import AttentionMergeTrial, draw
from warploom.runtime.family import RuntimeFamily


class AttentionMergeRuntime(RuntimeFamily[AttentionMergeOperation, AttentionMergeShape]):
    """Calls of `attention_merge`."""

    function = staticmethod(attention_merge)
    operands = 4

    def call(self, *operands: Any, **keywords: Any) -> AttentionMergeCall:
        """The call that `attention_merge` makes, for `explain`."""
        return AttentionMergeCall(*operands, **keywords)

    def trial(
        self,
        operation: AttentionMergeOperation,
        shape: AttentionMergeShape,
        device: str,
        seed: int,
    ) -> AttentionMergeTrial:
        """Random calls: see trial.py."""
        return AttentionMergeTrial(operation, shape, device, seed)

    def calls(
        self, operation: AttentionMergeOperation, shape: AttentionMergeShape
    ) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]


FAMILY = AttentionMergeRuntime()

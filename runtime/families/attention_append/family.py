"""Appending, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from typing import Any

from warploom.generator.families.attention_append import (
    AttentionAppendOperation,
    AttentionAppendShape,
)
from warploom.runtime.baselines import Baseline
from warploom.runtime.call import Call
from warploom.runtime.families.attention_append.api import append_kv_cache
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_append.trial import AttentionAppendTrial, baselines, draw
from warploom.runtime.family import RuntimeFamily


class AttentionAppendRuntime(RuntimeFamily[AttentionAppendOperation, AttentionAppendShape]):
    """Calls of `attention_append`."""

    function = staticmethod(append_kv_cache)
    operands = len(AttentionAppendCall.declaration.required)

    def call(self, *operands: Any, **keywords: Any) -> AttentionAppendCall:
        """The call that `attention_append` makes, for `explain`."""
        return AttentionAppendCall(*operands, **keywords)

    def trial(
        self,
        operation: AttentionAppendOperation,
        shape: AttentionAppendShape,
        device: str,
        seed: int,
    ) -> AttentionAppendTrial:
        """Random calls: see trial.py."""
        return AttentionAppendTrial(operation, shape, device, seed)

    def calls(
        self, operation: AttentionAppendOperation, shape: AttentionAppendShape
    ) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]

    def baselines(
        self, operation: AttentionAppendOperation, trial: AttentionAppendTrial
    ) -> list[Baseline]:
        """The same in eager torch: rotation, quantization, and writes at indices."""
        return baselines(trial.sets)


FAMILY = AttentionAppendRuntime()

"""Quantization of attention, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeShape,
)
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.families.attention_quantize.api import attention_quantize
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall
from warploom.runtime.families.attention_quantize.trial import AttentionQuantizeTrial, draw
from warploom.runtime.family import RuntimeFamily


class AttentionQuantizeRuntime(RuntimeFamily[AttentionQuantizeOperation, AttentionQuantizeShape]):
    """Calls of `attention_quantize`."""

    function = staticmethod(attention_quantize)
    operands = 3

    def call(self, *operands: Any, **keywords: Any) -> AttentionQuantizeCall:
        """The call that `attention_quantize` makes, for `explain`."""
        q, k, v = operands
        return AttentionQuantizeCall(v, q, k, **keywords)

    def trial(
        self,
        operation: AttentionQuantizeOperation,
        shape: AttentionQuantizeShape,
        device: str,
        seed: int,
    ) -> AttentionQuantizeTrial:
        """Random calls: see trial.py."""
        return AttentionQuantizeTrial(operation, shape, device, seed)

    def calls(
        self, operation: AttentionQuantizeOperation, shape: AttentionQuantizeShape
    ) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]

    def baselines(
        self, operation: AttentionQuantizeOperation, trial: AttentionQuantizeTrial
    ) -> list[Baseline]:
        """The same operations in torch, eager and compiled."""
        read = [(one.v, one.q, one.k, one.cu_seqlens) for one in trial.sets]
        return eager_and_compiled(partial(_quantized, operation), read)


def _quantized(
    operation: AttentionQuantizeOperation,
    v: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> list[torch.Tensor]:
    scores, smooth = operation.scores, operation.smooth
    call = AttentionQuantizeCall(v, q, k, scores, smooth, cu_seqlens=cu_seqlens)
    return [one for one in call.computed_by_torch() if one is not None]


FAMILY = AttentionQuantizeRuntime()

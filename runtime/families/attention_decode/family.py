"""The family of decoding attention, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families.attention_decode import DecodeOperation, DecodeShape
from warploom.runtime.baselines import Baseline
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families.attention_decode import api, reference, samples
from warploom.runtime.families.attention_decode.baselines import baselines
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.families.attention_decode.extents import extents
from warploom.runtime.sampled import Bound, CallTrial, SampledFamily


class AttentionDecodeRuntime(SampledFamily[DecodeOperation, DecodeShape]):
    """Calls of `warploom.attention_decode`."""

    function = staticmethod(api.attention_decode)
    operands = 3

    def call(self, *operands: Any, **keywords: Any) -> AttentionDecodeCall:
        """The call that `attention_decode` makes, for `explain`."""
        keywords.pop("return_lse", None)
        return AttentionDecodeCall(*operands, **keywords)

    def draw(
        self,
        operation: DecodeOperation,
        shape: DecodeShape,
        device: str,
        random: torch.Generator | None,
    ) -> AttentionDecodeCall:
        """A call with random operands: see samples.py."""
        return samples.draw(operation, shape, device, random)

    def expected(self, call: AttentionDecodeCall) -> list[Bound]:
        """What is right, and how far off a kernel may be."""
        sizes = extents(call)
        masked = band(call.plain, sizes)
        exact, _ = reference.of_call(call, sizes, masked, reference.exact)
        off, _ = reference.of_call(call, sizes, masked, reference.bound)
        return [(exact, off)]

    def baselines(self, operation: DecodeOperation, trial: CallTrial) -> list[Baseline]:
        """Every backend of torch's sdpa, on caches in one piece and in the type of q."""
        return baselines(operation, trial.sets)

    def rehearse(self) -> None:
        """Decode on the CPU."""
        one = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)
        api.attention_decode(one, one, one)


FAMILY = AttentionDecodeRuntime()

"""Products with packed weights, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from warploom.generator.families.mixed_gemm import MixedGemmOperation, MixedGemmShape
from warploom.quantization import PackedWeight
from warploom.runtime.baselines import Baseline, Results, eager_and_compiled
from warploom.runtime.families._product.reference import apply, rounded
from warploom.runtime.families.mixed_gemm import api, reference, samples
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
from warploom.runtime.families.mixed_gemm.grouped_call import GroupedMixedCall
from warploom.runtime.sampled import Bound, CallTrial, SampledFamily, share


def baselines(sets: Sequence[MixedGemmCall]) -> list[Baseline]:
    """torch.mm (cuBLAS) in bf16 by the dequantized weight, eager and compiled.

    Activations of 8 bits are converted before as well. The weight that is dequantized in every call
    is shown too: it takes as little memory.
    """
    wide = torch.float16 if sets[0].a.dtype == torch.float16 else torch.bfloat16
    operands = []
    for one in sets:
        weight: Any = one.weight
        operands.append((one, one.a.to(wide), weight.dequantize(wide).t()))
    name = f"torch.mm (cuBLAS), {str(wide).removeprefix('torch.')}, dequantized weight"
    each: list[Callable[[], Results]] = [partial(_each, one, wide) for one in sets]
    return [
        *eager_and_compiled(_product, operands, name),
        Baseline("dequantize, then torch.mm, in each call", each, peer=False),
    ]


def _product(one: MixedGemmCall, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = torch.mm(a, weight)
    dtype = x.dtype if one.out is None else one.out.dtype
    return rounded(apply(x, one.listed), dtype, one.listed)


def _each(one: MixedGemmCall, wide: torch.dtype) -> torch.Tensor:
    weight: Any = one.weight
    return _product(one, one.a.to(wide), weight.dequantize(wide).t())


class MixedGemmRuntime(SampledFamily[MixedGemmOperation, MixedGemmShape]):
    """Calls of `warploom.mixed_gemm`."""

    function = staticmethod(api.mixed_gemm)
    operands = 2

    def call(self, *operands: Any, **keywords: Any) -> MixedGemmCall:
        """The call that `mixed_gemm` makes."""
        return MixedGemmCall.asked(*operands, **keywords)

    def draw(
        self,
        operation: MixedGemmOperation,
        shape: MixedGemmShape,
        device: str,
        random: torch.Generator | None,
    ) -> MixedGemmCall | GroupedMixedCall:
        """A call with random operands: see samples.py."""
        draw = samples.draw if operation.groups == "none" else samples.draw_grouped
        return draw(operation, shape, device, random)

    def expected(self, call: MixedGemmCall | GroupedMixedCall) -> list[Bound]:
        """What is right in each way of applying scales, and how far off a kernel may be."""
        if isinstance(call, GroupedMixedCall):
            return [call.bound(way) for way in reference.ways(call.a.dtype, call.weight[0])]
        weight: PackedWeight = call.weight
        dtype = call.out.dtype if call.out is not None else call.a.dtype
        return [
            reference.bound(call.a, weight, call.listed, dtype, way)
            for way in reference.ways(call.a.dtype, weight)
        ]

    def share(self, results: Sequence[torch.Tensor | None], expected: list[Bound]) -> float:
        """The least error of any way: a result is right where it is so in one of them."""
        return min(share(results, [one]) for one in expected)

    def baselines(self, operation: MixedGemmOperation, trial: CallTrial) -> list[Baseline]:
        """torch.mm by the dequantized weight; of groups there is none."""
        return baselines(trial.sets) if operation.groups == "none" else []


FAMILY = MixedGemmRuntime()

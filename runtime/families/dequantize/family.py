"""Dequantization, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from warploom.generator.families.dequantize import DequantizeOperation, DequantizeShape
from warploom.quantization import Metadata, PackedExperts, PackedWeight, quantize
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.dequantize.api import dequantize
from warploom.runtime.families.dequantize.call import (
    SCALES,
    DequantizeCall,
    DequantizeRowsCall,
    Details,
    packing,
)
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.sampled import CallTrial, Results, SampledFamily, bits_share
from warploom.runtime.tensors import normal
from warploom.runtime.trial import wrong

_FEW = 4  # weights of experts that differ: their numbers do not decide a time

AnyCall = DequantizeCall | DequantizeRowsCall


class DequantizeRuntime(SampledFamily[DequantizeOperation, DequantizeShape]):
    """Calls of `dequantize`."""

    function = staticmethod(dequantize)
    operands = 1
    called = DequantizeCall

    def call(
        self,
        weight: PackedWeight | PackedExperts | torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        *,
        scale: torch.Tensor | None = None,
        **keywords: Any,
    ) -> AnyCall:
        """The call that `dequantize` makes of a whole weight."""
        if isinstance(weight, torch.Tensor):
            return DequantizeRowsCall(weight, scale, dtype, **keywords)  # type: ignore[arg-type]
        parts = weight.slabs, packing(weight.metadata), weight.channel_scales, weight.channel_zeros
        return DequantizeCall(*parts, dtype, **keywords)

    def draw(
        self,
        operation: DequantizeOperation,
        shape: DequantizeShape,
        device: str,
        random: torch.Generator | None,
    ) -> AnyCall:
        """A call with quantized normal weights, whose result has its place; on `meta`, undrawn."""
        dtype = TORCH[operation.w]
        out = torch.empty((shape.experts, shape.n, shape.k), dtype=dtype, device=device)
        if operation.layout == "rows":
            data = normal(tuple(out.shape), random, device).to(torch.float8_e4m3fn)
            blocks = shape.experts, blocks_of(shape.n), blocks_of(shape.k)
            scale = normal(blocks, random, device)
            kinds = {name: kind for kind, name in SCALES.items()}
            scale = scale.exp2().to(kinds[operation.scale])
            return DequantizeRowsCall(data, scale, dtype, out=wrong(out))
        return self.call(experts(operation, shape, device, random), dtype, out=wrong(out))

    def expected(self, call: AnyCall) -> Results:
        """What the result is, by plain torch operations on the same device."""
        blank = replace(call, out=None, spec=None)
        made = blank.results(Details())
        blank.compute(Details(), made)
        return made

    def share(self, results: Results, expected: Results) -> float:
        """0 where all bits are right, else more than 1."""
        return bits_share(results, expected)

    def baselines(self, operation: DequantizeOperation, trial: CallTrial) -> list[Baseline]:
        """The same by torch's operators, eager and compiled."""
        return eager_and_compiled(_by_torch, [(one,) for one in trial.sets])


def experts(
    operation: DequantizeOperation,
    shape: DequantizeShape,
    device: str,
    random: torch.Generator | None,
) -> PackedExperts:
    """Quantized normal weights of an operation; of many experts some are alike."""
    group = operation.group or None
    scale = None if operation.scale in ("e8m0", "e4m3") else TORCH[operation.scale]
    metadata = Metadata(
        operation.format, group, operation.scale, operation.activations, shape.n, shape.k
    )
    made = PackedExperts.empty(shape.experts, metadata, device)
    if device == "meta":
        return made
    count = min(_FEW, shape.experts)
    for expert in range(count):
        weight = normal((shape.n, shape.k), random, device)
        zeros = None if operation.weight.has_zeros else True
        how = (operation.format, group, zeros, scale, operation.activations)
        made.put(expert, quantize(weight, *how))
    for tensor in made.tensors().values():
        for expert in range(count, shape.experts):
            tensor[expert] = tensor[expert % count]
    return made


def _by_torch(one: AnyCall) -> torch.Tensor:
    made = one.results(Details())
    one.compute(Details(), made)
    return made[0]


FAMILY = DequantizeRuntime()

"""GEMMs with 2:4 sparse weights, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families.sparse_gemm import SparseGemmOperation, SparseGemmShape
from warploom.quantization.sparse_weight import SparseWeight, sparsify
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families.sparse_gemm import reference
from warploom.runtime.families.sparse_gemm.api import sparse_gemm
from warploom.runtime.families.sparse_gemm.call import SparseGemmCall
from warploom.runtime.sampled import Bound, CallTrial, SampledFamily
from warploom.runtime.tensors import normal
from warploom.runtime.trial import wrong


class SparseGemmRuntime(SampledFamily[SparseGemmOperation, SparseGemmShape]):
    """Calls of `sparse_gemm`."""

    function = staticmethod(sparse_gemm)
    operands = 2

    def call(
        self, x: torch.Tensor, weight: SparseWeight, *rest: Any, **named: Any
    ) -> SparseGemmCall:
        """The call that `sparse_gemm` makes, for `explain`."""
        return SparseGemmCall(x, weight.values, weight.metadata, *rest, **named)

    def draw(
        self,
        operation: SparseGemmOperation,
        shape: SparseGemmShape,
        device: str,
        random: torch.Generator | None,
    ) -> SparseGemmCall:
        """A call with normal operands, of a weight whose smaller values became zeros."""
        dtype, of_y = TORCH[operation.element], TORCH[operation.of_output]

        def drawn(*extents: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            values = normal(extents, random, device)
            return (
                (40 * values).clamp(-127, 127).to(dtype)
                if dtype == torch.int8
                else values.to(dtype)
            )

        def scales(count: int) -> torch.Tensor | None:
            if not operation.scaled:
                return None
            return drawn(count, dtype=torch.float32).abs() / 64 + 1e-3

        weight = (
            SparseWeight.empty(shape.n, shape.k, dtype, device)
            if device == "meta"
            else sparsify(drawn(shape.n, shape.k))
        )
        return SparseGemmCall(
            drawn(shape.m, shape.k),
            weight.values,
            weight.metadata,
            drawn(shape.n, dtype=of_y) if operation.bias else None,
            None if operation.activation == "none" else operation.activation,
            wrong(torch.empty(shape.m, shape.n, dtype=of_y, device=device)),
            scale_x=scales(shape.m),
            scale_weight=scales(shape.n),
        )

    def expected(self, call: SparseGemmCall) -> list[Bound]:
        """What is right, and how far off a kernel may be."""
        return [reference.bound(call.x, call.weight, call.items, call.of_y)]

    def baselines(self, operation: SparseGemmOperation, trial: CallTrial) -> list[Baseline]:
        """torch's GEMM (cuBLAS) by the dense weight, eager and compiled."""
        operands = [(one, one.x, one.weight.dense().t()) for one in trial.sets]
        if operation.element == "int8":
            return eager_and_compiled(_integers, operands, "torch._int_mm (cuBLAS), dense weight")
        if operation.element == "e4m3":
            return eager_and_compiled(_fp8, operands, "torch._scaled_mm (cuBLAS), dense weight")
        return eager_and_compiled(_product, operands, "torch.mm (cuBLAS), dense weight")


def _product(one: SparseGemmCall, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return apply(torch.mm(x, weight), one.items)


def _integers(one: SparseGemmCall, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sums = torch._int_mm(x, weight)
    return apply(sums.float(), one.items).to(one.of_y)


def _fp8(one: SparseGemmCall, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    unit = torch.ones((), device=x.device)
    scale_x = unit if one.scale_x is None else one.scale_x.reshape(-1, 1)
    scale_weight = unit if one.scale_weight is None else one.scale_weight.reshape(1, -1)
    y = torch._scaled_mm(x, weight, scale_a=scale_x, scale_b=scale_weight, out_dtype=one.of_y)
    return apply(y, [item for item in one.items if item[0] not in ("scale_a", "scale_b")])


FAMILY = SparseGemmRuntime()

"""Products with 2:4 sparse weights, as measuring and building ahead of time ask for them."""

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
        dtype = TORCH[operation.element]

        def drawn(*extents: int) -> torch.Tensor:
            return torch.randn(extents, generator=random, device=device).to(dtype)

        weight = (
            SparseWeight.empty(shape.n, shape.k, dtype, device)
            if device == "meta"
            else sparsify(drawn(shape.n, shape.k))
        )
        return SparseGemmCall(
            drawn(shape.m, shape.k),
            weight.values,
            weight.metadata,
            drawn(shape.n) if operation.bias else None,
            None if operation.activation == "none" else operation.activation,
            wrong(torch.empty(shape.m, shape.n, dtype=dtype, device=device)),
        )

    def bound(self, call: SparseGemmCall) -> Bound:
        """What is right, and how far off a kernel may be."""
        listed = reference.items(call.bias, call.activation)
        return reference.bound(call.x, call.weight, listed, call.x.dtype)

    def baselines(self, operation: SparseGemmOperation, trial: CallTrial) -> list[Baseline]:
        """torch.mm (cuBLAS) by the dense weight, eager and compiled."""
        operands = [(one, one.x, one.weight.dense().t()) for one in trial.sets]
        return eager_and_compiled(_product, operands, "torch.mm (cuBLAS), dense weight")


def _product(one: SparseGemmCall, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return apply(torch.mm(x, weight), reference.items(one.bias, one.activation))


FAMILY = SparseGemmRuntime()

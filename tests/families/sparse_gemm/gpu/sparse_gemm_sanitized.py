"""A few small calls, checked on the CPU: what compute-sanitizer watches."""

from __future__ import annotations

from dataclasses import replace

import sparse_gemm_cases as cases
import torch
from processes import verify_each

from warploom.generator.families.sparse_gemm import SparseGemmOperation
from warploom.generator.specification import KernelSpec
from warploom.quantization.sparse_weight import sparsify
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.sparse_gemm import reference
from warploom.runtime.families.sparse_gemm.call import SparseGemmCall
from warploom.runtime.measure import largest_share

KERNELS = cases.EVERY[:4]
M, N, K = 70, 264, 320


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on rows, columns and k that no tile divides."""
    operation: SparseGemmOperation = kernel.operation  # type: ignore[assignment]
    dtype, of_y = TORCH[operation.element], TORCH[operation.of_output]
    x, weight = torch.randn(M, K), torch.randn(N, K) / K**0.5
    if dtype == torch.int8:
        x, weight = ((40 * one).round().clamp(-127, 127) for one in (x, weight * K**0.5))
    packed = sparsify(weight.to(dtype))
    call = SparseGemmCall(
        x.to(dtype),
        packed.values,
        packed.metadata,
        torch.randn(N).to(of_y) if operation.bias else None,
        None if operation.activation == "none" else operation.activation,
        None,
        kernel,
        torch.rand(M) / 64 + 1e-3 if operation.scaled else None,
        torch.rand(N) / 64 + 1e-3 if operation.scaled else None,
        of_y,
    )
    exact, bound = reference.bound(call.x, call.weight, call.items, of_y)
    moved = {name: one.cuda() for name, one in call.named() if one is not None}
    (y,) = plan.run(replace(call, **moved))
    assert largest_share(y.cpu(), exact, bound) <= 1


if __name__ == "__main__":
    verify_each(verify, KERNELS)

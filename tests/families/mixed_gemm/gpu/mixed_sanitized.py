"""A few tiny products of packed weights, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

import mixed_cases as cases
import torch
from mixed_cases import SIMPLE
from processes import verify_each

import warploom
from warploom.generator.families.mixed_gemm import MixedGemmOperation, MixedGemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.steps.step import Draws
from warploom.runtime.families.mixed_gemm import reference, samples

M, N, K = 19, 136, 640
KERNELS = [SIMPLE[name] for name in ("few", "some", "many", "split", "shared")]
KERNELS += [cases.FORMATS[-1]]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on the GPU and compare with the reference on the CPU."""
    of = kernel.operation
    assert isinstance(of, MixedGemmOperation)
    draws = Draws("cpu", torch.Generator().manual_seed(1))
    a = draws.values(of.a, (M, K))
    weight = samples.weight(of, MixedGemmShape(M, N, K), draws)
    out = torch.zeros(M, N, dtype=TORCH[of.d]).cuda()
    d = warploom.mixed_gemm(a.cuda(), weight.to("cuda"), out=out, spec=kernel).cpu()
    scaled = cases.schedule(kernel).scaled
    exact, bound = reference.bound(a, weight, (), out.dtype, scaled)
    assert ((d.double() - exact).abs() <= bound).all(), kernel.name


if __name__ == "__main__":
    verify_each(verify, KERNELS)

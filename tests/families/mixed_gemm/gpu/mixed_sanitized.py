"""A few tiny products of packed weights, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
Stages are few, so that each is used again. Kernels are as they are but for one thing: every lane
of a warp lets go of a stage, where one lane does it for all. For racecheck lanes are threads apart,
and what orders the others' reads before that lane's arrival is not there to be seen: the compiler
leaves out a __syncwarp where a warp has not diverged, and such a warp's reads are one instruction.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mixed_cases as cases
import mutants
import torch
from mixed_cases import SIMPLE
from processes import verify_each

import warploom
from warploom.generator.families.mixed_gemm import MixedGemmOperation, MixedGemmShape
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.workers import WorkerPool
from warploom.runtime import kernel as kernels
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.steps.step import Draws
from warploom.runtime.families.mixed_gemm import reference, samples

M, N, K = 19, 136, 640
CHOSEN = [SIMPLE[name] for name in ("few", "some", "many", "split", "shared")] + [cases.FORMATS[-1]]
KERNELS = [replace(one, schedule=replace(one.schedule, stages=2)) for one in CHOSEN]
COUNT = ("shared.empty[stage].init(kWarps);", "shared.empty[stage].init(kWarps * 32);")
ARRIVALS = {
    "mma": ("  if (threadIdx.x % 32 == 0) empty.arrive();", "  empty.arrive();"),
    "wgmma": ("int(there && threadIdx.x % 32 == 0)", "int(there)"),
}
EDITED = [(one, (COUNT, ARRIVALS[cases.schedule(one).multiply])) for one in KERNELS]


def prepare() -> None:
    """Have the kernels run with every lane letting go of stages."""
    with WorkerPool(len(KERNELS)) as pool:
        texts = [mutants.edited(render(one), edits) for one, edits in EDITED]
        compiling = [
            pool.submit(partial(mutants.compile_text, one, text))
            for one, text in zip(KERNELS, texts, strict=True)
        ]
        for one, artifact in zip(KERNELS, compiling, strict=True):
            kernels._kernels[one] = kernels.Kernel(one, artifact.result())


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
    prepare()
    verify_each(verify, KERNELS)

"""DeepGEMM's fp8 GEMM with scales of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.peers._products import prepared_baseline
from benchmarks.peers.libraries import imported
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.samples import Operands


def deep_gemm(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """DeepGEMM's fp8_gemm_nt, with the scales of A as its kernels read them."""

    def prepare(one: Operands, out: torch.Tensor) -> Callable[[], object]:
        library = imported("deep_gemm", "deep_gemm")  # it loads compilers that may be missing
        layout = imported("deep_gemm", "deep_gemm.utils.layout")
        if operation.block_scales != "row_block":
            raise RuntimeError("deep_gemm: 1x128 by 1x128 adds to fp32, which is not timed here")
        (_, scale_a), (_, scale_b) = one.listed[:2]
        of_a = layout.get_mn_major_tma_aligned_tensor(scale_a.contiguous())
        weight = one.b.t(), scale_b.contiguous()
        return partial(library.fp8_gemm_nt, (one.a, of_a), weight, out)

    outs = [torch.empty_like(one.out) for one in given]
    return prepared_baseline("deep_gemm", operation, given, prepare, outs)

"""QuACK's GEMMs, tuned by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.peers._products import baseline, require_bf16
from benchmarks.peers.libraries import imported
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.samples import Operands


def quack(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """A release for another CUTLASS DSL fails at import in its own ways."""
    return baseline("quack", _quack, operation, given, checked=1)


def _quack(operation: GemmOperation, one: Operands, out: torch.Tensor) -> None:
    require_bf16("quack", operation)
    imported("quack", "quack.gemm_interface").gemm(one.a, one.b, out=out, tuned=True)


def gated_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(gate) * up of a b, whose columns are those of gate and up in turn."""
    imported("quack", "quack.gemm_interface").gemm_gated(
        a, b, activation="swiglu", postact_out=out, store_preact=False, tuned=True
    )

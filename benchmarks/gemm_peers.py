"""The peers of a product by name: cuBLAS as torch calls it, QuACK, and Triton as torch writes it.

One whose package is missing, or that does not compute this type, says so when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers import Kind, Operands, peer
from benchmarks.protocol import Contender
from benchmarks.triton_peers import gemm_peer
from warploom.runtime.measure import error_share

Peer = Callable[[Kind, Sequence[Operands]], Contender]


def cublas(kind: Kind, sets: Sequence[Operands]) -> Contender:
    """torch.mm, torch._scaled_mm or torch._int_mm."""
    return peer(kind, sets)


def quack(kind: Kind, sets: Sequence[Operands]) -> Contender:
    """QuACK's GEMM, tuned by itself."""
    outs = [
        torch.full((one.a.shape[0], one.b.shape[1]), torch.nan, device=one.a.device).bfloat16()
        for one in sets
    ]

    def call(one: Operands, out: torch.Tensor) -> None:
        if kind.a != "bf16":
            raise RuntimeError(f"quack: not for {kind.a} here")
        try:
            interface: Any = import_module("quack.gemm_interface")
        except Exception as error:  # a release for another CUTLASS DSL fails in its own ways
            raise RuntimeError(f"quack: {type(error).__name__}: {error}") from error
        interface.gemm(one.a, one.b, out=out, tuned=True)

    calls = [partial(call, one, out) for one, out in zip(sets, outs, strict=True)]
    return Contender("quack", calls, lambda: error_share(outs[0], sets[0].a, sets[0].b))


PEERS: dict[str, Peer] = {"cublas": cublas, "triton": gemm_peer, "quack": quack}

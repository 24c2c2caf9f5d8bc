"""The host's time of products with quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import warploom
from benchmarks.peers.public import Cell


def _host(layer: bool) -> tuple[Callable[[], object], float]:
    x = torch.randn(16, 256, device="cuda").bfloat16()
    weight = warploom.quantize(torch.randn(256, 256, device="cuda").bfloat16(), "int4", group=128)
    made = warploom.nn.QuantizedLinear.from_packed(weight)
    return (lambda: made(x)) if layer else (lambda: warploom.mixed_gemm(x, weight)), 0.0


CELLS = [
    Cell("host mixed_gemm", partial(_host, False), host=True),
    Cell("host mixed linear", partial(_host, True), host=True),
]

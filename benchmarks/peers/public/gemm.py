"""Products, and the host's time of calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import warploom
from benchmarks.peers.public import Cell

Made = tuple[Callable[[], object], float]


def _product(kind: str, m: int, n: int, k: int) -> Made:
    a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    if kind == "e4m3":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return partial(warploom.gemm, a, b.t(), out=out), a.nbytes + b.nbytes + out.nbytes


def _host(what: str) -> Made:
    a, b = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    planned = warploom.plan(a, b, out=out)
    layer = warploom.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    frozen = warploom.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    calls: dict[str, Callable[[], object]] = {
        "gemm": lambda: warploom.gemm(a, b),
        "gemm, out given": lambda: warploom.gemm(a, b, out=out),
        "plan, out given": lambda: planned(a, b, out),
        "linear": lambda: frozen(a),
        "linear, autograd": lambda: layer(a),
        "linear, both passes": lambda: torch.autograd.grad(layer(a), list(layer.parameters()), b),
    }
    return calls[what], 0.0


EXTENTS = [
    *((1, 6144, 4096), (16, 4096, 14336), (64, 1280, 8192), (100, 6144, 4096)),
    *((512, 28672, 4096), (2048, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192)),
]
CELLS = [
    *(
        Cell(f"gemm {kind} {m}x{n}x{k}", partial(_product, kind, m, n, k))
        for m, n, k in EXTENTS
        for kind in ("bf16", "e4m3")
    ),
    *(
        Cell(f"host {what}", partial(_host, what), host=True)
        for what in (
            *("gemm", "gemm, out given", "plan, out given"),
            *("linear", "linear, autograd", "linear, both passes"),
        )
    ),
]

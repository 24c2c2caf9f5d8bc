"""Gated products beside a plain product and the best elementwise kernel behind it.

Cells are the projections of gated feed-forward layers, [gate; up] as one weight [2 I, K]. Beside
Warploom's kernel stand the same without a gate (how much of the time the product is), Warploom's
and cuBLAS's product with silu(gate) * up by torch.compile or Liger behind, and QuACK's gated
product, whose weight was interleaved beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._block_scaled_layer import block_scaled_layers
from benchmarks.peers._gated_layer import gated_layers
from benchmarks.peers._products import TYPES, Shape, floor, ours, sets
from benchmarks.peers.libraries.liger import silu_mul
from benchmarks.peers.libraries.quack import gated_gemm
from benchmarks.peers.libraries.triton import compiled
from warploom.generator.configurations import cells
from warploom.generator.epilogue import Gate
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.reference import gemm_exact
from warploom.runtime.families.gemm.samples import Operands
from warploom.runtime.trial import wrong

Product = Callable[[Operands, torch.Tensor], object]
Gating = Callable[[torch.Tensor], torch.Tensor]

# Of results that are rounded to bf16 between product and gate, beside the largest.
ROUNDED = 2.0**-6


def gated(asked: Asked) -> Iterator[Case]:
    """The listed layers at each M, in bf16 and in e4m3 with a scale per row and column; then whole
    layers: those that train, and those of checkpoints in e4m3.
    """
    listed = cells()["gemm"]["gated"]
    for kind in listed["types"]:
        plain = TYPES[kind]
        operation = replace(plain, epilogue=(*plain.epilogue, Gate("silu")))
        for n, k in listed["weights"]:
            for m in asked.m or listed["m"]:
                shape = (m, n, k)
                name = f"gated {kind} {'x'.join(map(str, shape))}"
                problem = {"m": m, "n": n, "k": k, "type": kind, "epilogue": "silu(gate) * up"}
                yield Case(
                    name,
                    problem,
                    floor(plain, shape),
                    partial(_contenders, plain, operation, shape),
                )
    yield from gated_layers(asked)
    yield from block_scaled_layers(asked)


def _contenders(
    plain: GemmOperation, operation: GemmOperation, shape: Shape, asked: Asked
) -> list[Contender]:
    given = sets(operation, shape, asked.device)
    m, n, _ = shape
    room = torch.empty((m, n), dtype=given[0].out.dtype, device=asked.device)
    bare = [replace(one, listed=one.listed[:-1], out=room) for one in given]
    fast = compiled(lambda: _silu_times)
    found = [
        ours(operation, given),
        replace(ours(plain, bare, "without the gate"), peer=False),
        _after("warploom, then torch.compile", bare, _ours, fast),
        _after("torch, then torch.compile", bare, _torchs(plain), fast),
        _after("warploom, then liger", bare, _ours, silu_mul),
    ]
    return [*found, _quack(given)] if operation.a == "bf16" else found


def _silu_times(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _ours(one: Operands, out: torch.Tensor) -> None:
    warploom.gemm(one.a, one.b, out=out, epilogue=one.listed)


def _torchs(operation: GemmOperation) -> Product:
    """cuBLAS's product, by whatever function of torch's computes the operation."""
    if operation.a == "bf16":
        return lambda one, out: torch.mm(one.a, one.b, out=out)

    def scaled(one: Operands, out: torch.Tensor) -> None:
        rows, columns = (value for _, value in one.listed)
        kinds: Any = {"out_dtype": out.dtype, "use_fast_accum": True}
        torch._scaled_mm(
            one.a, one.b, scale_a=rows[:, None], scale_b=columns[None], out=out, **kinds
        )

    return scaled


def _after(name: str, given: Sequence[Operands], product: Product, gating: Gating) -> Contender:
    """A product, then what gates its columns; each rounds to 16 bits."""

    def call(one: Operands) -> torch.Tensor:
        product(one, one.out)
        return gating(one.out)

    def share() -> float:
        return _share(call(given[0]), given[0])

    return Contender(name, [partial(call, one) for one in given], share, peer=True)


def _quack(given: Sequence[Operands]) -> Contender:
    outs = [wrong(one.out) for one in given]
    interleaved = [_interleaved(one.b) for one in given]
    calls = [
        partial(gated_gemm, one.a, b, out)
        for one, b, out in zip(given, interleaved, outs, strict=True)
    ]
    return Contender("quack", calls, lambda: _share(outs[0], given[0]), peer=True)


def _interleaved(b: torch.Tensor) -> torch.Tensor:
    """A weight whose columns are those of gate and up in turn."""
    k, n = b.shape
    return b.t().reshape(2, n // 2, k).transpose(0, 1).reshape(n, k).t()


def _share(found: torch.Tensor, one: Operands) -> float:
    """The largest error, as a share of what rounding between product and gate may cost."""
    listed = list(one.listed)
    if "gate" not in [item[0] for item in listed]:
        listed.append(("gate", "silu"))
    exact, _ = gemm_exact(one.a, one.b, listed)
    return float((found.double() - exact).abs().max() / (ROUNDED * exact.abs().max()))

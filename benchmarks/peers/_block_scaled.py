"""Block-scaled products of e4m3: Warploom, torch by cuBLASLt, and DeepGEMM where it is installed.

Scales of A and B are laid out beforehand as each wants them; only the product is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from benchmarks.families import Asked, Case
from benchmarks.peers._products import Peer, Shape, floor, ours, sets, worst
from warploom.generator.configurations import cells
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.samples import Operands

_LISTED = cells()["gemm"]["block_scaled"]

TYPES = {
    "e4m3_block": GemmOperation(
        "e4m3", "e4m3", "bf16", accumulation="promoted", block_scales="row_block"
    ),
    "e4m3_block_row": GemmOperation(
        "e4m3", "e4m3", "bf16", accumulation="promoted", block_scales="row_row"
    ),
}


def block_scaled(asked: Asked) -> Iterator[Case]:
    """The weights of models whose checkpoints have block scales, and products of gradients."""
    weights = [(n, k) for n, k in _LISTED["weights"]]
    rows = asked.m or _LISTED["m"]
    shapes = {
        "e4m3_block": [(m, n, k) for n, k in weights for m in rows],
        "e4m3_block_row": [(m, n, k) for m, n, k in _LISTED["row_row"]],
    }
    for name, operation in TYPES.items():
        for shape in shapes[name]:
            yield _case(f"{name} {'x'.join(map(str, shape))}", operation, shape, type=name)


def _case(name: str, operation: GemmOperation, shape: Shape, **about: object) -> Case:
    def contenders(asked: Asked) -> Iterator[Contender]:
        given = sets(operation, shape, asked.device)
        yield ours(operation, given)
        yield ours(operation, [_turned(one) for one in given], "warploom, scales of A along M")
        for peer in asked.peers or PEERS:
            if peer in PEERS:
                yield PEERS[peer](operation, given)
        for spec in asked.specs:
            if spec.operation == operation:
                yield ours(operation, given, spec.name, spec)

    problem = {**dict(zip("mnk", shape, strict=True)), **about}
    return Case(name, problem, floor(operation, shape), lambda asked: list(contenders(asked)))


def _turned(one: Operands) -> Operands:
    """The same operands, the scales of A side by side along M, as TMA and torch read them."""
    (kind, scale_a), *rest = one.listed
    return replace(one, listed=((kind, scale_a.t().contiguous().t()), *rest))


def _contender(
    name: str,
    operation: GemmOperation,
    given: Sequence[Operands],
    prepared: Callable[[Operands, torch.Tensor], Callable[[], object]],
    outs: Sequence[torch.Tensor],
) -> Contender:
    """A contender that prepares its own layouts when it is first called, or says why it cannot."""
    ready: dict[int, Callable[[], object]] = {}

    def call(index: int) -> None:
        if index not in ready:
            ready[index] = prepared(given[index], outs[index])
        ready[index]()

    shown = [out[: one.out.shape[0]] for one, out in zip(given, outs, strict=True)]
    calls = [partial(call, index) for index in range(len(given))]
    return Contender(name, calls, lambda: worst(operation, given, shown), peer=True)


def torchs(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """torch.nn.functional.scaled_mm, which takes multiples of 4 rows: others are padded before."""

    def padded(one: torch.Tensor, to: int, dim: int) -> torch.Tensor:
        missing = -one.shape[dim] % to
        return functional.pad(one, (*[0, 0] * (one.dim() - 1 - dim), 0, missing))

    def prepared(one: Operands, out: torch.Tensor) -> Callable[[], object]:
        (_, scale_a), (_, scale_b) = one.listed[:2]
        a = padded(one.a.view(torch.uint8), 4, 0).view(one.a.dtype)
        of_a = padded(scale_a, 4, 0).t().contiguous().t()
        if operation.block_scales == "row_block":  # whose k blocks come in fours
            of_b = padded(scale_b, 4, 1).contiguous().t()
        else:
            of_b = scale_b.t().contiguous()
        options: Any = {"out_dtype": out.dtype, "out": out}
        return partial(torch._scaled_mm, a, one.b, of_a, of_b, **options)

    rows = -(-given[0].out.shape[0] // 4) * 4
    outs = [one.out.new_empty(rows, one.out.shape[1]) for one in given]
    return _contender("torch._scaled_mm", operation, given, prepared, outs)


def deep_gemm(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """DeepGEMM's fp8_gemm_nt, with the scales of A as its kernels read them."""

    def prepared(one: Operands, out: torch.Tensor) -> Callable[[], object]:
        try:
            library: Any = import_module("deep_gemm")
            layout: Any = import_module("deep_gemm.utils.layout")
        except Exception as error:  # it loads compilers that may be missing
            raise RuntimeError(f"deep_gemm: {type(error).__name__}: {error}") from error
        if operation.block_scales != "row_block":
            raise RuntimeError("deep_gemm: 1x128 by 1x128 adds to fp32, which is not timed here")
        (_, scale_a), (_, scale_b) = one.listed[:2]
        of_a = layout.get_mn_major_tma_aligned_tensor(scale_a.contiguous())
        weight = one.b.t(), scale_b.contiguous()
        return partial(library.fp8_gemm_nt, (one.a, of_a), weight, out)

    outs = [torch.empty_like(one.out) for one in given]
    return _contender("deep_gemm", operation, given, prepared, outs)


PEERS: dict[str, Peer] = {"cublas": torchs, "deep_gemm": deep_gemm}

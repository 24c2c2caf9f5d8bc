"""Products that nobody tuned, as models run them, beside every way that torch has to compute them.

Kernels of a configuration that compete (`--specs`) make a sweep: what a choice is judged by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import cast

import torch

import warploom
from benchmarks.families import BEFORE, Asked, Case
from benchmarks.peers import _block_scaled
from benchmarks.peers._libraries import BLOCK_SCALED, GEMM
from benchmarks.peers._products import TYPES, Shape, floor, ours
from benchmarks.peers.libraries.torch_kernels import cublaslt
from benchmarks.problems import products
from warploom.generator.elements import element
from warploom.generator.families.gemm import SCALE_BLOCK, GemmOperation, GemmShape
from warploom.generator.records import problem_text
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.alone import alone
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.reference import gemm_bound
from warploom.runtime.families.gemm.samples import GemmData, Operands
from warploom.runtime.measure import largest_share
from warploom.runtime.trial import wrong

DRAWN = {**TYPES, "fp16": GemmOperation("fp16", "fp16", "fp16"), **_block_scaled.TYPES}
ROUNDS, SWEPT = 15, 5  # that count: of a few contenders, and of the many of a sweep


def drawn(asked: Asked) -> Iterator[Case]:
    """The products of a seed, of every type its own."""
    for name, operation in DRAWN.items():
        bits = element(operation.a).bits
        for m, n, k in products(f"gemm {name}", bits, asked.seed, asked.count):
            scaled = operation.block_scales != "none"  # baselines take whole blocks of k
            shape = m, n, -(-k // SCALE_BLOCK) * SCALE_BLOCK if scaled else k
            problem = {**dict(zip("mnk", shape, strict=True)), "type": name, "seed": asked.seed}
            yield Case(
                f"{name} {'x'.join(map(str, shape))}",
                problem,
                floor(operation, shape),
                partial(contenders, operation, shape),
                alone,
                rounds=1 + (SWEPT if asked.specs else ROUNDS),
                discarded=1,
                again=not asked.specs,
                tuned=problem_text(operation, GemmShape(*shape)),
            )


def contenders(operation: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    """Warploom as dispatched, its peers, and each kernel that competes and computes the same."""
    one = GemmData(operation, GemmShape(*shape), asked.device, 0).operands()
    found = [ours(operation, [one])]
    if before := asked.before.get(problem_text(operation, GemmShape(*shape))):
        found.append(ours(operation, [one], BEFORE, parse_name(before)))
    scaled = operation.block_scales != "none"
    baselines = BLOCK_SCALED if scaled else GEMM
    for name in asked.peers or (BLOCK_SCALED if scaled else ("cublas",)):
        if name in baselines:
            found.append(baselines[name](operation, [one]))
        if name == "cublas" and element(operation.a).bits == 16:
            found.append(cublaslt(operation, [one]))
    bound = cache(
        lambda: gemm_bound(one.a, one.b, one.listed, one.out.dtype, operation.accumulation)
    )
    return [
        *found,
        *(swept(spec, one, bound) for spec in asked.specs if spec.operation == operation),
    ]


def swept(
    spec: KernelSpec, one: Operands, bound: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> Contender:
    """One kernel. All of a sweep write to one output, so that each runs once more to be checked."""
    is_fast = cast("GemmOperation", spec.operation).accumulation == "fast"
    call = partial(
        warploom.gemm,
        one.a,
        one.b,
        out=one.out,
        epilogue=one.listed,
        use_fast_accum=is_fast,
        spec=spec,
    )

    def share() -> float:
        one.out.copy_(wrong(one.out))
        call()
        return largest_share(one.out, *bound())

    return Contender(spec.name, [call], share, lambda: (spec.name, ""))

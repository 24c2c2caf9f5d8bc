"""Block-scaled GEMMs of e4m3: Warploom, torch by cuBLASLt, and DeepGEMM where it is installed.

Scales of A and B are laid out beforehand as each wants them; only the GEMM is timed. Cases of up to
128 rows have a type of their own, since their bar is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.families import Asked, Case
from benchmarks.peers._libraries import BLOCK_SCALED
from benchmarks.peers._products import Shape, floor, ours, sets
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


FEW = 128  # rows, up to which a case is of the type `e4m3_block_few`


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
            few = name == "e4m3_block" and shape[0] <= FEW
            yield _case(
                f"{name} {'x'.join(map(str, shape))}",
                operation,
                shape,
                type=f"{name}_few" if few else name,
            )


def _case(name: str, operation: GemmOperation, shape: Shape, **about: object) -> Case:
    def contenders(asked: Asked) -> Iterator[Contender]:
        given = sets(operation, shape, asked.device)
        yield ours(operation, given)
        yield ours(operation, [_along_k(one) for one in given], "warploom, scales along k")
        for peer in asked.peers or BLOCK_SCALED:
            if peer in BLOCK_SCALED:
                yield BLOCK_SCALED[peer](operation, given)
        for spec in asked.specs:
            if spec.operation == operation:
                yield ours(operation, given, spec.name, spec)

    problem = {**dict(zip("mnk", shape, strict=True)), **about}
    return Case(name, problem, floor(operation, shape), lambda asked: list(contenders(asked)))


def _along_k(one: Operands) -> Operands:
    """The same operands with contiguous scales, which warps of the producer copy."""
    scales = [(kind, value.contiguous()) for kind, value in one.listed[:2]]
    return replace(one, listed=(*scales, *one.listed[2:]))

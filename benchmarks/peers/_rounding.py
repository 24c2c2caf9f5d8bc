"""Results that are rounded stochastically in the epilogue, beside results rounded to nearest.

The difference is what random numbers cost: each is drawn by the threads that finish a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.families import Asked, Case
from benchmarks.peers._products import TYPES, Shape, floor, ours, sets
from warploom.generator.configurations import cells
from warploom.generator.epilogue import StochasticRounding
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender


def rounded(asked: Asked) -> Iterator[Case]:
    """The listed products, [operands, D], at each M, N, K."""
    listed = cells()["gemm"]["rounding"]
    for kind, d in listed["types"]:
        plain = replace(TYPES[kind], d=d)
        for shape in map(tuple, listed["shapes"]):
            name = f"rounding {kind} {d} {'x'.join(map(str, shape))}"
            m, n, k = shape
            problem = {"m": m, "n": n, "k": k, "type": kind, "epilogue": f"stochastic {d}"}
            yield Case(name, problem, floor(plain, shape), partial(_contenders, plain, shape))


def _contenders(plain: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    operation = replace(plain, epilogue=(*plain.epilogue, StochasticRounding()))
    given = sets(operation, shape, asked.device)
    bare = [replace(one, listed=one.listed[:-1]) for one in given]
    return [
        ours(operation, given, "warploom, stochastic"),
        replace(ours(plain, bare, "warploom, to nearest"), peer=True),
    ]

"""Strassen's algorithm beside the ordinary product, ours and torch's: from which sizes it pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._products import TYPES, Shape, floor, sets
from warploom.generator.configurations import cells
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.samples import Operands
from warploom.runtime.families.gemm.strassen import LEVELS, error_share
from warploom.runtime.trial import wrong

SAMPLED = 16  # rows and columns of each part of D: float64 of all would take longer than the cells


def strassen(_asked: Asked) -> Iterator[Case]:
    """The listed types at each M, N, K."""
    listed = cells()["gemm"]["strassen"]
    for kind in listed["types"]:
        for shape in map(tuple, listed["shapes"]):
            name = f"strassen {kind} {'x'.join(map(str, shape))}"
            m, n, k = shape
            problem = {"m": m, "n": n, "k": k, "type": kind, "algorithm": "strassen"}
            operation = TYPES[kind]
            make = partial(_contenders, operation, shape)
            yield Case(name, problem, floor(operation, shape), make)


def _contenders(operation: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    given = sets(operation, shape, asked.device)
    first, second = (
        _contender(f"warploom, {algorithm}", partial(warploom.gemm, algorithm=algorithm), given, of)
        for algorithm, of in LEVELS.items()
    )
    plain = _contender("warploom", warploom.gemm, given, 0)
    library = replace(_contender("torch.mm", torch.mm, given, 0), told=None, peer=True)
    return [first, replace(plain, peer=True), library, second]


def _contender(
    name: str, function: Callable[..., object], given: Sequence[Operands], levels: int
) -> Contender:
    outs = [wrong(one.out) for one in given]
    pairs = list(zip(given, outs, strict=True))
    calls = [partial(function, one.a, one.b, out=out) for one, out in pairs]
    algorithm = next((name for name, of in LEVELS.items() if of == levels), None)

    def told() -> tuple[str, str]:
        found = warploom.explain(warploom.gemm, given[0].a, given[0].b, algorithm=algorithm)
        return found.kernel, found.reason

    return Contender(name, calls, lambda: max(_sampled(d, one, levels) for one, d in pairs), told)


def _sampled(d: torch.Tensor, one: Operands, levels: int) -> float:
    """The share of the bound of some rows and columns, which lie alike in each part of D."""
    random = torch.Generator().manual_seed(0)

    def places(extent: int) -> torch.Tensor:
        part = extent >> levels
        first = torch.randint(part, (SAMPLED,), generator=random)
        return torch.cat([first + at * part for at in range(1 << levels)]).to(d.device)

    rows, columns = places(d.shape[0]), places(d.shape[1])
    return error_share(d[rows][:, columns], one.a[rows], one.b[:, columns], levels)

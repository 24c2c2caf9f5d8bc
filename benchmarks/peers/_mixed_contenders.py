"""Contenders of a mixed product: Warploom, its peers, and the dense products beside them.

Peers multiply the same quantised numbers, a cell's figure is of the fastest of them. Dense products
(`dense`) are of the dequantised weight: in bf16 by torch and by Warploom, and in e4m3 or int8
where the activations are; they are no peers, but what a quantised weight would replace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.families import Asked
from benchmarks.peers._checked import Right, tried
from benchmarks.peers._libraries import MIXED
from benchmarks.peers._mixed_problem import (
    Activations,
    Kind,
    Quantised,
    Shape,
    quantised,
    right,
)
from benchmarks.peers._mixed_weights import Eight, EightInteger, Packed, Weight, Wide, WideGemm
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender
from warploom.runtime.trial import buffer_sets, wrong

DENSE: dict[str, type[Weight]] = {
    "torch.mm, bf16": Wide,
    "warploom.gemm, bf16": WideGemm,
    "warploom.gemm, e4m3": Eight,
    "warploom.gemm, int8": EightInteger,
}
EIGHT: dict[type[Weight], str] = {
    Eight: "e4m3",
    EightInteger: "int8",
}  # whose activations they take


def contenders(kind: Kind, shape: Shape, asked: Asked) -> list[Contender]:
    """Warploom as dispatched, its peers, dense products, and kernels that compete."""
    return list(_contenders(Products(kind, shape, asked.device), asked))


def _contenders(products: Products, asked: Asked) -> Iterator[Contender]:
    yield products.contender("warploom", Packed)
    for name, (called, layout) in MIXED.items():
        if not asked.peers or name in asked.peers:
            yield products.contender(called, layout, peer=True)
    if not asked.peers or "dense" in asked.peers:
        for called, layout in DENSE.items():
            if EIGHT.get(layout, products.kind.activations) == products.kind.activations:
                yield products.contender(called, layout)
    for spec in asked.specs:
        if spec.operation.family == "mixed_gemm":  # one for another cell says so
            yield products.contender(spec.name, Packed, spec=spec)


class Product:
    """A call of a contender; `out` has its last result."""

    def __init__(self, weight: Weight, a: Activations, out: torch.Tensor) -> None:
        self.weight, self.a, self.out = weight, a, out

    def __call__(self) -> None:
        self.out = self.weight.multiply(self.a, self.out)


class Products:
    """One product of a quantised weight, and what its results may be."""

    def __init__(self, kind: Kind, shape: Shape, device: str) -> None:
        self.kind, (self.m, n, k), self.device = kind, shape, device
        self.given = quantised(kind, n, k, device)
        self.a = Activations.draw(kind, self.m, k, device)
        self._known: dict[type[Weight], Right] = {}

    def contender(
        self,
        name: str,
        layout: type[Weight],
        *,
        peer: bool = False,
        spec: KernelSpec | None = None,
    ) -> Contender:
        """As many calls as outlast L2, on weights and results of their own; or why there is none.

        Activations are the same in all: in a model they have just been written.
        """

        def make() -> list[Product]:
            return [self._product(one, spec) for one in weights(self.given, layout, self.device)]

        def told(first: Product) -> tuple[str, str]:
            return first.weight.told(first.a, first.out)

        def error_share(calls: Sequence[Product]) -> float:
            right = self.right(layout)  # once for all that share their numbers
            return max(right.share(call.out) for call in calls)

        return tried(name, make, error_share, told if layout is Packed else None, peer=peer)

    def _product(self, weight: Weight, spec: KernelSpec | None) -> Product:
        if spec is not None:
            weight = replace(weight, spec=spec)  # type: ignore[call-arg]
        out = torch.empty(self.m, self.given.codes.n, dtype=torch.bfloat16, device=self.device)
        return Product(weight, self.a, wrong(out))

    def right(self, layout: type[Weight]) -> Right:
        """What a contender's results are held against: of the numbers that it multiplies."""
        if _numbers(layout) == _numbers(Packed):
            layout = Packed
        if layout not in self._known:
            weight = weights(self.given, layout, self.device)[0]
            a, w = self.a.exact(wide=layout.wide), weight.exact(self.given.codes)
            multiplied = "bf16" if layout.wide else self.kind.activations
            self._known[layout] = right(a, w, multiplied, layout.accumulation)
        return self._known[layout]


def _numbers(layout: type[Weight]) -> tuple[object, ...]:
    """What decides which numbers a contender multiplies, and how exactly."""
    return layout.exact, layout.wide, layout.accumulation


def weights(given: Quantised, layout: type[Weight], device: str) -> list[Weight]:
    """A weight in a contender's layout, as often as it takes to outlast L2 when used in turn."""
    if layout not in given.kept:
        first, count = layout.of(given), 1
        if device == "cuda":
            count = buffer_sets(first.bytes, torch.cuda.get_device_properties(0).L2_cache_size)
        given.kept[layout] = [first, *(first.copy() for _ in range(count - 1))]
    found: list[Weight] = given.kept[layout]
    return found

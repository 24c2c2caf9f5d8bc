"""Kernels of matrices that are sparse by blocks, their calls, and mutants: `gemm_sparse.py NAME`.

A mutant is run until a result is wrong. Exit status 0: one was, as it must be.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import gemm_mutants
import torch
from product_arena import assert_within, fill, guarded
from rooms import Guarded

import warploom
from warploom.generator.elements import element
from warploom.generator.epilogue import Bias, Scale
from warploom.generator.families.gemm import GemmOperation, complete
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families.gemm.block_masks import expanded, size_of
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.families.gemm.block_sparse import NAME, BlockSparseCall


def spec(
    sparse: str,
    tile: tuple[int, int] = (128, 128),
    *,
    a: str = "bf16",
    d: str = "bf16",
    layouts: str = "row col",
    bias: bool = False,
    **schedule: Any,
) -> KernelSpec:
    """Return a kernel; what is not given is the plainest."""
    steps = (Scale("host"), Bias("bf16")) if bias else (Scale("host"),)
    operation = GemmOperation(
        *(a, a, d, *layouts.split(), steps),  # type: ignore[arg-type]
        sparse=sparse,  # type: ignore[arg-type]
    )
    fields = {"tile": (*tile, 1024 // element(a).bits), **schedule}
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, fields))


PINGPONG = {"kernel_schedule": "pingpong"}
KERNELS = [
    spec("a", (128, 256)),
    spec("a", (128, 256), cluster=(1, 2), bias=True),
    spec("a", (128, 256), cluster=(1, 2), layouts="row row", stages=3),
    spec("a", (128, 128), **PINGPONG),
    spec("a", (128, 128), cluster=(1, 2), bias=True, **PINGPONG),
    spec("a", (128, 96), cluster=(1, 4), stages=2, store="direct", d="fp32", **PINGPONG),
    spec("a", (128, 64), consumers=1, layouts="col row", a="fp16", d="fp16", swizzle_size=3),
    spec("a", (128, 256), a="e4m3"),
    spec("a", (128, 128), a="int8", d="fp32", raster="along_n"),
    spec("b", (256, 128), layouts="col row", raster="along_n"),
    spec("b", (256, 128), layouts="col row", raster="along_n", cluster=(2, 1)),
    spec("b", (128, 128), layouts="col row", raster="along_n", cluster=(2, 1), **PINGPONG),
    spec("b", (64, 128), consumers=1, bias=True, store="direct"),
    spec("b", (128, 128), a="fp16", d="fp16", layouts="row row", swizzle_size=1, **PINGPONG),
    spec("b", (256, 128), a="e4m3", raster="along_n"),
    spec("d", (128, 128), layouts="row row", **PINGPONG),
    spec("d", (128, 128)),
    spec("d", (128, 128), a="fp16", d="fp16", layouts="col row", store="direct", **PINGPONG),
    spec("d", (128, 128), a="e4m3", d="fp32", **PINGPONG),
    spec("d", (128, 128), layouts="row row", cluster=(1, 2), **PINGPONG),
    spec("d", (128, 128), a="fp16", d="fp16", layouts="col row", cluster=(1, 2), store="direct"),
    spec("d", (128, 128), a="e4m3", d="fp32", cluster=(1, 2), swizzle_size=3, **PINGPONG),
]
SHAPES = {
    "a block": (128, 128, 128),
    "part of a block": (61, 72, 40),
    "ragged": (300, 392, 520),
    "many k blocks": (257, 264, 4104),
    "more tiles than multiprocessors": (3001, 2504, 328),
    "several rounds": (4096, 4096, 1024),
}
DENSITIES = (0.0, 0.3, 0.5, 1.0)


@dataclass
class Call:
    """Everything that one call of a kernel is given."""

    kernel: KernelSpec
    a: Guarded
    b: Guarded
    d: Guarded
    bias: Guarded | None
    mask: torch.Tensor
    alpha: float = 0.37

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        operation = cast("GemmOperation", self.kernel.operation)
        return warploom.block_sparse_gemm(
            self.a.view,
            self.b.view,
            self.mask,
            sparse=NAME[operation.sparse],
            alpha=self.alpha,
            bias=None if self.bias is None else self.bias.view[0],
            out=self.d.view,
            spec=self.kernel,
        )


def call(kernel: KernelSpec, m: int, n: int, k: int, density: float, *, seed: int = 0) -> Call:
    """Make a call on random data, NaN (of int8, -1) where blocks of an operand do not count."""
    generator = torch.Generator("cuda").manual_seed(seed)
    operation = cast("GemmOperation", kernel.operation)
    a = guarded(m, k, TORCH[operation.a], operation.layout_a)
    b = guarded(k, n, TORCH[operation.b], operation.layout_b)
    d = guarded(m, n, TORCH[operation.d], odd="direct" in kernel.name)
    for operand in (a, b):
        fill(operand.view, generator)
    bias = guarded(1, n, torch.bfloat16) if len(operation.epilogue) > 1 else None
    if bias is not None:
        fill(bias.view, generator)
    rows, columns = size_of(operation.sparse, m, n, k)
    shape = blocks_of(rows), blocks_of(columns)
    mask = torch.rand(shape, device="cuda", generator=generator) < density
    if shape[0] > 2:
        mask[1] = False  # a list without an entry among others
    if seed % 2:  # masks may be views
        mask = mask.t().contiguous().t()
    if operation.sparse != "d":
        own = (a if operation.sparse == "a" else b).view
        # Bytes of 0xff are NaN, of int8 -1.
        bits = own.view({1: torch.int8, 2: torch.int16}[own.dtype.itemsize])
        bits.masked_fill_(~expanded(mask, rows, columns), -1)
    return Call(kernel, a, b, d, bias, mask)


def exact(made: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """D in float64, and how far a kernel's may be off."""
    sparse = cast("GemmOperation", made.kernel.operation).sparse
    bias = None if made.bias is None else made.bias.view[0]
    return BlockSparseCall(
        made.a.view, made.b.view, made.mask, bias, sparse, made.alpha, made.d.view
    ).bound()


def verify(made: Call) -> None:
    """Run a call: D is right in every element, and nothing is written beside it."""
    made.d.room.fill_(-1)
    d = made.run()
    assert made.d.untouched_outside()
    assert_within(d, *exact(made))


@dataclass(frozen=True)
class Mutant(gemm_mutants.Mutant):
    """And the share of blocks that count."""

    density: float = 0.5


MUTANTS = {
    "a tile has the list of the row before": Mutant(
        KERNELS[0],
        r"lists \+ place\.m / kBlock \* 2",
        (520, 512, 1024),
        "lists + max(place.m / kBlock - 1, 0) * 2",
    ),
    "a list begins an entry too early": Mutant(
        KERNELS[0], r"block \* k_blocks : -1", (520, 512, 1024), "max(block * k_blocks - 1, 0) : -1"
    ),
    "the last k tile of a list is left out": Mutant(
        KERNELS[0],
        r"max\(entries \* \(kBlock / kTileK\), 1\)",
        (520, 512, 1024),
        "max(entries * (kBlock / kTileK) - 1, 1)",
    ),
    "a block's first k tile is multiplied twice": Mutant(
        KERNELS[3], r"block \* kOfBlock \+ k_tile % kOfBlock", (520, 512, 1024), "block * kOfBlock"
    ),
    "an empty list has the first block": Mutant(
        KERNELS[0],
        r"at\.first_entry < 0 \? \(p\.k \+ kBlock - 1\) / kBlock",
        (520, 512, 1024),
        "at.first_entry < 0 ? 0",
    ),
    "a column has the list of the one before": Mutant(
        KERNELS[10],
        r"lists \+ place\.n / kBlock \* 2",
        (520, 512, 1024),
        "lists + max(place.n / kBlock - 1, 0) * 2",
    ),
    "blocks of a list are those of the row above in the mask": Mutant(
        KERNELS[0], r"p\.mask\[block \*", (520, 512, 1024), "p.mask[max(block - 1, 0) *"
    ),
    "a block of D that does not count is computed": Mutant(
        KERNELS[15],
        r"computed \? 0 : all_k_tiles, k_tiles = computed \? all_k_tiles : 1",
        (520, 512, 1024),
        "0, k_tiles = all_k_tiles",
    ),
    "a block of D that counts lacks its last k tile": Mutant(
        KERNELS[15], r"computed \? all_k_tiles : 1", (520, 512, 1024), "max(all_k_tiles - 1, 1)"
    ),
    "blocks of D are counted from 0 in each round": Mutant(
        KERNELS[15], r"own_seen \+= __popc\(own\);", (4224, 4224, 128)
    ),
    "blocks of two rows of D share A": Mutant(
        KERNELS[19], r"computed && list.*?columns;", (4224, 4224, 128), "computed;"
    ),
    "a block of D alone in its row has but a half of A": Mutant(
        KERNELS[19],
        r"a_first, a_receivers\)",  # the first half twice: one that never comes would hang
        (4224, 4224, 128),
        "a_begin, a_receivers)",
    ),
}


if __name__ == "__main__":
    chosen = MUTANTS[sys.argv[1]]
    given = (chosen.kernel, *chosen.shape, chosen.density)
    gemm_mutants.judge(chosen, lambda seed: verify(call(*given, seed=seed)))

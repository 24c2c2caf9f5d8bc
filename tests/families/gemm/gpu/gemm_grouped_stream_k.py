"""Kernels of grouped GEMMs with stream_k, and mutants of these: `gemm_grouped_stream_k.py NAME`.

A mutant is run until a result is wrong. Exit status 0: one was, as it must be.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import gemm_grouped as grouped
import gemm_mutants
from gemm_grouped import BIAS, COLUMN, ROUTINGS, ROW, SWAPPED, Call, Mutant, Routing, spec
from grouped_walk import Walk, exchange_of, tiles_of

from warploom.generator.epilogue import Gate, Residual
from warploom.generator.families._product.groups import few_tiles
from warploom.generator.families.gemm.launch import GemmProblem, at_launch
from warploom.runtime import driver

STREAM: dict[str, Any] = {"stream_k": True}
FEW: dict[str, Any] = {**STREAM, **SWAPPED}
ROWS = [
    spec((32, 128), **FEW),
    spec((16, 128), layout_b="row", **FEW),
    spec((64, 128), a="fp16", d="fp16", raster="along_n", swizzle_size=3, **FEW),
    spec((16, 64), consumers=1, store="direct", **FEW),
    spec((128, 128), **STREAM),
    spec((64, 64), consumers=1, d="fp32", **STREAM),
    spec((128, 128), cluster=(2, 1), **STREAM),
    spec((128, 64), cluster=(1, 2), layout_b="row", **STREAM),
    spec((32, 128), epilogue=(BIAS, Gate("swiglu_oai", "interleaved"), ROW), **FEW),
    spec((32, 128), epilogue=(Residual("fp32"),), **FEW),
    spec((128, 128), epilogue=(BIAS, Gate("silu"), ROW, Residual("bf16")), **STREAM),
    spec((32, 128), a="e4m3", **FEW),
    spec((32, 128), a="e4m3", accumulation="promoted", epilogue=(ROW, COLUMN), **FEW),
    spec((128, 128), a="e4m3", epilogue=(ROW, COLUMN, BIAS, Gate("silu")), **STREAM),
    spec((128, 128), a="int8", d="int32", **STREAM),
]
BLOCKS = [
    spec((32, 128), scales="fp32", **FEW),
    spec((16, 64), scales="e8m0", consumers=1, **FEW),
    spec((128, 128), scales="fp32", **STREAM),
    spec((32, 128), scales="fp32", epilogue=(BIAS, Gate("silu")), **FEW),
]
MASKED = [
    spec((32, 128), "masked", **FEW),
    spec((32, 128), "masked", scales="fp32", **FEW),
    spec((64, 64), "masked", consumers=1, store="direct", **STREAM),
]
KERNELS = [*ROWS, *BLOCKS, *MASKED]
# With K of gpt-oss: 45 k tiles of 16 bits; of 1,024 matrices 16 k tiles, the last of them short.
ROUTED = {
    "eight rows": (Routing(8, 128, "even", 0), 2880),
    "forty rows": (Routing(40, 128, "skewed", 3), 2880),
    **{name: (routing, 2880) for name, routing in ROUTINGS.items()},
    "as many groups as there may be": (ROUTINGS["as many groups as there may be"], 1008),
}


def walk(made: Call) -> Walk:
    """Return what clusters multiply in a call, by offsets that only tests read back."""
    (rows, k), n, groups = made.a.view.shape, made.b.view.shape[-1], len(made.offs)
    masked = made.groups == "masked"
    counts = made.offs if masked else made.offs.diff(prepend=made.offs.new_zeros(1))
    problem = GemmProblem(rows, n, k, k, k, n, batches=groups)
    at = at_launch(made.kernel, problem, driver.limits(0))
    few = cast("int", few_tiles().value(at))
    k_tiles = -(-k // at.schedule.tile[2])
    tiles = tiles_of(made.kernel, n, counts.tolist())
    return Walk(few, exchange_of(made.kernel), tiles, k_tiles, at.cut.clusters)


_SHAPE = (1, 1, 1)  # a routing says it
# Of so many k tiles parts are left at times that differ by more than a launch's first CTAs do.
LONG = {"parts are added that nobody has left yet": 60_000}
MUTANTS = {
    "the last k tile of the last range is not multiplied": Mutant(
        ROWS[0],
        r"high\(start\(cluster \+ 1\)\)",
        _SHAPE,
        "high(start(cluster + 1) - (cluster + 1 == ranges))",
    ),
    "the last range has a k tile of the one before": Mutant(
        ROWS[0],
        r"low\(start\(cluster\)\)",
        _SHAPE,
        "low(start(cluster) - (cluster > 0 && cluster + 1 == ranges))",
    ),
    "the first part of a tile is not added": Mutant(
        ROWS[4],
        r"walk\.first\(unit\.tile\), cluster\)",
        _SHAPE,
        "walk.first(unit.tile) + 1, cluster)",
    ),
    "a part has the first k tiles of its tile": Mutant(
        ROWS[0],
        r"int k_tile = unit\.begin; k_tile < unit\.end",
        _SHAPE,
        "int k_tile = 0; k_tile < unit.end - unit.begin",
    ),
    "a part has the block scales of the first k tiles of its tile": Mutant(
        BLOCKS[0], r"min\(begin, \(p\.k", _SHAPE, "min(0, (p.k"
    ),
    "parts are added that nobody has left yet": Mutant(
        ROWS[0],
        r'do asm volatile\("ld\.acquire.*\n\s*while \(up == 0\);',
        _SHAPE,
        routing=ROUTINGS["a row"],
    ),
}


if __name__ == "__main__":
    chosen, k = MUTANTS[sys.argv[1]], LONG.get(sys.argv[1], 2880)
    gemm_mutants.judge(
        chosen,
        lambda seed: grouped.verify(grouped.call(chosen.kernel, chosen.routing, seed=seed, k=k)),
    )

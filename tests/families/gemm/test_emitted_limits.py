"""What is launched is counted in 32 bits, and hardly more is refused: by the emitted text.

It runs on the CPU, at the largest problems that launches let through and at those just beyond.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edges import H200, counts, largest
from host import build, definitions, needs_compiler

from warploom.generator.families._product import tiles
from warploom.generator.families.gemm import GemmOperation, GemmProblem, complete
from warploom.generator.render import render
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec

pytestmark = needs_compiler
HARNESS = Path(__file__).with_name("limits.cpp")
STUBS = """
using std::min;
#define __device__
#define __forceinline__ inline
"""
SCHEDULES: dict[str, dict[str, Any]] = {
    "cluster": {"tile": (128, 256, 64), "cluster": (2, 1)},
    "along n": {"tile": (128, 128, 64), "cluster": (1, 2), "raster": "along_n"},
    "pingpong": {"tile": (128, 128, 64), "kernel_schedule": "pingpong"},
    "split": {"tile": (64, 96, 64), "consumers": 1, "cluster_split_k": 4},
    "group": {"tile": (64, 8, 64), "consumers": 1, "swizzle_size": 1024, "store": "direct"},
}


def gemm_text(spec: KernelSpec) -> str:
    text = render(spec)
    (k_tiles, _) = re.findall(r"const int k_tiles = (.*);", text)
    batched = spec.operation.batched  # type: ignore[union-attr]
    return "\n".join(
        (
            STUBS,
            "struct Parameters { int m, n, k, batches; };",
            *(["#define BATCHED"] if batched else []),
            *([] if "int kSplit" in text else ["constexpr int kSplit = 1;"]),
            *re.findall(
                r"^constexpr int k(?:Tile|Cluster|Split|Consumers|Sharing|Swizzle).*?$",
                text,
                re.M,
            ),
            *definitions(text, "TileCoord", "Tiles"),
            f"static int k_tiles(const Parameters& p) {{ return {k_tiles}; }}",
            f'#line 1 "{HARNESS}"',
            HARNESS.read_text(),
        )
    )


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product_that_is_launched_is_counted_and_one_beyond_is_not(
    schedule: str, batched: bool, tmp_path: Path
) -> None:
    operation = GemmOperation("bf16", "bf16", "bf16", batched=batched)
    spec = KernelSpec("sm_90a", operation, complete("sm_90a", operation, dict(SCHEDULES[schedule])))
    program = build(gemm_text(spec), tmp_path)
    found: Any = spec.schedule
    m, n, k = found.tile
    beside = {
        "m": 2 * m * found.cluster[0],
        "n": 2 * max(n * found.cluster[1], 8),
        "k": 2 * k * found.cluster_split_k,
        "batches": 2 * 2 * 132,
    }

    def runs(problem: GemmProblem) -> bool:
        clusters = min(tiles(found, problem), H200.clusters(found.cluster_size))
        fields = (problem.m, problem.n, problem.k, problem.batches, clusters)
        return counts(program, " ".join(map(str, fields)))

    for base in ((1, 1, 64), (5000, 7, 64), (7, 5000, 64), (2**19, 2**19, 64)):
        problem = GemmProblem(*base, pitch_a=64, pitch_b=64, pitch_d=8)
        for field in ("m", "n", "k", *(("batches",) if batched else ())):
            edge = largest(spec, problem, field)
            assert runs(replace(problem, **{field: edge})), (base, field, edge)
            if edge + beside[field] <= LARGEST:
                beyond = replace(problem, **{field: edge + beside[field]})
                assert not runs(beyond), (base, field, edge)

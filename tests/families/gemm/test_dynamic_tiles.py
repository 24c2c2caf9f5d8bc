"""Block-sparse GEMMs whose clusters take tiles from a counter: their emitted roles, emulated."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from host import build, needs_compiler
from test_block_sparse import STUBS

from warploom.errors import SpecificationError
from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import GemmOperation, GemmProblem, complete
from warploom.generator.families.gemm.launch import launches, workspaces
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

HERE = Path(__file__).parent
LIST_THREADS = 64  # in place of 1024, which take their time to start: see test_block_sparse.py
FIELDS = """
struct Parameters {
  cute::TmaDescriptor a_map, a_tail_map, b_map, zeros_map;
  int m, n, k, a_tail_rows;
  const uint8_t* mask;
  int64_t mask_row, mask_column;
  int *lists, *entries, *tiles, *counter;
};
static void set(Parameters& p, int* lists, int* entries) {
  p.lists = lists;
  p.entries = p.tiles = entries;
}
"""
STRUCTS = (
    *("PipelineState", "OrderedBarrier", "TileCoord", "Tiles", "ListedTiles", "KTiles"),
    *("ComputedTiles", "Mail", "TileCounter", "TileSlot"),
)
CONSTANTS = (
    *("Tile", "Cluster", "Consumers", "Sharing", r"Stages\b", "Swizzle", "Rows", "Wgmma"),
    *("Count", "Chunk", "Frag"),
)
PINGPONG = {"kernel_schedule": "pingpong"}
KERNELS: list[tuple[str, dict[str, Any]]] = [
    ("a", {"tile": (128, 256, 64)}),
    ("a", {"tile": (128, 128, 64), "stages": 2, "swizzle_size": 3, **PINGPONG}),
    ("a", {"tile": (128, 256, 64), "cluster": (1, 2)}),
    ("a", {"tile": (128, 64, 64), "cluster": (1, 4), "stages": 3, **PINGPONG}),
    ("b", {"tile": (256, 128, 64), "cluster": (2, 1), "raster": "along_n"}),
    ("b", {"tile": (128, 128, 64), **PINGPONG}),
    ("d", {"tile": (128, 128, 64), **PINGPONG}),
    ("d", {"tile": (128, 128, 64), "cluster": (1, 2), "stages": 2, **PINGPONG}),
    ("d", {"tile": (128, 128, 64), "store": "direct"}),
]
# m, n, k, clusters, percent of blocks that count
CASES = [
    (8, 8, 8, 1, 100),
    (300, 392, 520, 1, 50),
    (300, 392, 520, 3, 0),
    (640, 1100, 520, 3, 30),
    (1300, 900, 136, 5, 60),
    (900, 700, 1100, 4, 10),
]


def spec(sparse: str, fields: dict[str, Any]) -> KernelSpec:
    operation = GemmOperation("bf16", "bf16", "bf16", epilogue=(Scale("host"),), sparse=sparse)  # type: ignore[arg-type]
    schedule = complete("sm_90a", operation, {"scheduler": "dynamic", **fields})
    return KernelSpec("sm_90a", operation, schedule)


def structs(text: str) -> list[str]:
    """The structs of a kernel that its roles need, in its order."""
    start = rf"(?:template <[^\n]*> )?struct (?:alignas\(\d+\) )?(?:{'|'.join(STRUCTS)})\b"
    return re.findall(rf"^{start}.*?^\}};", text, re.M | re.S)


def roles(text: str) -> list[str]:
    """The functions of a kernel's roles, in its order."""
    names = "store_zeros|produce|consume"
    return re.findall(rf"^__device__ __forceinline__ void (?:{names})\(.*?^\}}", text, re.M | re.S)


def program(kernel: KernelSpec, text: str) -> str:
    """The text of a program that emulates a kernel's text."""
    schedule, layout = kernel.schedule, gemm_layout(kernel.operation, kernel.schedule)
    constants = re.findall(rf"^constexpr int k(?:{'|'.join(CONSTANTS)})\w* = .*$", text, re.M)
    (making,) = re.findall(r'^extern "C"[^\n]*\n    \w+_lists\(.*?^\}', text, re.M | re.S)
    making = re.sub(r"  wait_for_previous_grid[^\n]*\n", "", making)
    making = making.replace(f"{kernel.name}_lists", "make_lists")
    making = making.replace("kThreads = 1024", f"kThreads = {LIST_THREADS}")
    zeroing = "store_zeros" in text
    defined = [
        "#define MAILED" * (schedule.cluster_size > 1),
        "#define ZEROING" * zeroing,
        f"constexpr int kListThreads = {LIST_THREADS}, kBlock = 128;",
        f"constexpr char kSparse = '{kernel.operation.sparse}';",
        f"constexpr int kZeroColumns = {max(8, layout.store_box[0])};",
        "using Value = float;",
        *constants,
    ]
    return "\n".join(
        (
            STUBS,
            *defined,
            (HERE / "emulated.h").read_text(),
            FIELDS,
            *structs(text)[:1],
            "using Position = PipelineState<kStages>;",
            *structs(text)[1:],
            (HERE / "taken_stubs.h").read_text(),
            *roles(text),
            making,
            f'#line 1 "{HERE / "taken.cpp"}"',
            (HERE / "taken.cpp").read_text(),
        )
    )


def emulate(kernel: KernelSpec, text: str, folder: Path) -> str:
    """What a program that emulates a kernel's text finds wrong; nothing where all is right."""
    built = build(program(kernel, text), folder)
    lines = "\n".join(" ".join(map(str, case)) for case in CASES)
    done = subprocess.run([built], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@needs_compiler
@pytest.mark.parametrize(("sparse", "fields"), KERNELS, ids=str)
def test_each_tile_is_taken_once_and_nobody_waits_in_vain(
    sparse: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    kernel = spec(sparse, fields)
    assert emulate(kernel, render(kernel), tmp_path) == ""


MUTANTS: dict[str, tuple[int, str, str]] = {
    "the counter is left as it was": (0, "p.counter[0] = 0;", ";"),
    "a cluster is told its own number again": (0, "clusters + atomicAdd", "atomicAdd"),
    "the second consumer has rows of its own": (1, "consumer % kSharing", "consumer"),
    "a consumer steps over as many k tiles as it has": (
        *(1, "skipped = shared.tiles[position.stage].k_tiles;"),
        "skipped = at.k_tiles;",
    ),
    "consumers are not told of the end": (0, "k_tiles = 0;  // ends", "k_tiles = 1;  // ends"),
    "mail is for one rank alone": (3, "rank < kClusterSize; ++rank", "rank < 2; ++rank"),
    "a block of zeros is left out": (6, "zero < zeros;", "zero < zeros - 1;"),
}


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_a_role_that_does_otherwise_is_noticed(name: str, tmp_path: Path) -> None:
    number, right, wrong = MUTANTS[name]
    kernel = spec(*KERNELS[number])
    text = render(kernel)
    assert right in text
    assert emulate(kernel, text.replace(right, wrong), tmp_path)


def test_a_call_has_a_counter_that_its_first_launch_resets() -> None:
    for (sparse, fields), zeros in ((KERNELS[0], False), (KERNELS[7], True), (KERNELS[8], False)):
        kernel = spec(sparse, fields)
        problem = GemmProblem(300, 400, 520, 520, 520, 400, mask_strides=(5, 1))
        first, second = launches(kernel, problem, DeviceLimits(132))
        assert (first.entry, second.entry) == (f"{kernel.name}_lists", kernel.name)
        assert {one.tensor: one.bytes for one in workspaces(kernel, problem)}["counter"] == 8
        assert not any(one.kept for one in workspaces(kernel, problem))
        assert ("zeros_map" in second.parameters) == zeros
        _, lists = re.split(r'^extern "C".*\n    \w+_lists\(', render(kernel), flags=re.M)
        assert "p.counter[0] = 0;" in lists


@pytest.mark.parametrize(
    ("sparse", "fields", "told"),
    [
        ("none", {"tile": (128, 256, 64)}, "scheduler dynamic with sparse none: must be static"),
        ("a", {"tile": (128, 128, 64), "producer_registers": 24}, "with scheduler dynamic"),
    ],
)
def test_schedules_without_lists_or_registers_take_no_counter(
    sparse: str, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(SpecificationError, match=told):
        spec(sparse, fields)

"""Which pairs a block of the backward pass computes, when it adds to dq, and what it stores.

The ranges, masks and turns of the emitted text run on the CPU, and what takes sums of dq apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from attention_backward_text import STUBS, host_text
from host import needs_compiler, run_each

from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

SUMS = Path(__file__).with_name("sums.cpp")
FRAGMENTS = Path(__file__).with_name("fragments.cpp")
STRUCT = "struct float4 { float x, y, z, w; };"


def verify_ranges(kernels: Mapping[str, KernelSpec], folder: Path) -> None:
    """Build what the kernels' texts say of ranges, and run each over random problems."""
    texts = {name: host_text(kernel) for name, kernel in kernels.items()}
    run_each(texts, folder, '#include "_attention/ranges.h"\n')


MASKS, LENGTHS = ("none", "causal", "window"), ("fixed", "packed")
ORDERS = ((False, 1), (True, 1), (False, 2), (True, 4), (False, 8))  # deterministic, cluster
TILES = ((64, 64, 64), (80, 128, 64), (64, 128, 192))  # of q, of k and v, the head dimension
SHARED_ROWS = ((192, 64), (256, 48))  # head dimension, q tile


def turns(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of all but the last, which takes turns: any two values are met together.

    What ranges and masks depend on is all there, and each of it with each tile.
    """
    *others, last = parameters
    return [
        (
            *(values[i] for values, i in zip(others, places, strict=True)),
            last[sum(places) % len(last)],
        )
        for places in product(*(range(len(values)) for values in others))
    ]


@needs_compiler
@pytest.mark.parametrize("mask", MASKS)
def test_every_pair_is_computed_once_in_turn_and_every_gradient_stored_once(
    mask: str, tmp_path: Path
) -> None:
    kernels = {}
    # Any two of mask, order, tile and lengths are met together.
    for at, (deterministic, cluster) in enumerate(ORDERS, MASKS.index(mask)):
        (q_tile, kv_tile, dim), lengths = TILES[at % len(TILES)], LENGTHS[at % len(LENGTHS)]
        fields: Any = (dim, mask, False, lengths, deterministic)
        operation = AttentionBackwardOperation("bf16", *fields)
        schedule = AttentionBackwardSchedule(
            q_tile,
            kv_tile,
            2 if q_tile > 64 else 1,
            overlap=q_tile > 64,
            cluster=cluster,
        )
        kernels[f"{fields}, {schedule}"] = KernelSpec("sm_90a", operation, schedule)
    assert len(kernels) == len(ORDERS)
    verify_ranges(kernels, tmp_path)


@needs_compiler
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_pair_that_a_mask_of_keys_shows_is_computed_once_in_turn(
    lengths: str, tmp_path: Path
) -> None:
    # Turns that count tiles which nobody computes would be waited for for ever.
    kernels = {}
    for i, j, k in product(range(3), range(2), range(2)):
        # Any two values of these, of clusters and of tiles are met together.
        case = MASKS[i], LENGTHS[j], bool(k)
        cluster, alibi = ((1, False), (2, True), (4, False))[(i + j + k) % 3]
        q_tile, kv_tile, dim = TILES[(2 * i + j + k) % 3]
        fields: Any = (dim, MASKS[i], False, *case[1:])
        operation = AttentionBackwardOperation("bf16", *fields, masked=True, alibi=alibi)
        schedule = AttentionBackwardSchedule(
            min(q_tile, 64), kv_tile, 1, overlap=False, cluster=cluster
        )
        if case[1] == lengths:
            kernels[str(case)] = KernelSpec("sm_90a", operation, schedule)
    assert len(kernels) == 6
    verify_ranges(kernels, tmp_path)


@needs_compiler
@pytest.mark.parametrize("mask", MASKS)
def test_two_blocks_that_share_rows_compute_every_pair_once_between_them(
    mask: str, tmp_path: Path
) -> None:
    kernels = {}
    for case in turns(MASKS, LENGTHS, (False, True), SHARED_ROWS):
        lengths, deterministic, (dim, q_tile) = case[1:]
        fields: Any = (dim, mask, False, lengths, deterministic)
        operation = AttentionBackwardOperation("bf16", *fields)
        schedule = AttentionBackwardSchedule(q_tile, 128, cluster_split="rows")
        if case[0] == mask:
            kernels[str(case)] = KernelSpec("sm_90a", operation, schedule)
    assert len(kernels) == 4
    verify_ranges(kernels, tmp_path)


@needs_compiler
def test_sums_lie_where_they_are_looked_for(tmp_path: Path) -> None:
    tiles = [  # head dimension, of q, of k and v
        *((32, 64, 128), (32, 128, 128), (64, 96, 128), (64, 112, 128), (64, 64, 64)),
        *((96, 64, 128), (96, 64, 64), (128, 80, 128), (192, 64, 128), (192, 64, 64)),
        *((256, 64, 128), (256, 48, 128)),
    ]
    run_each({str(one): sums_text(*one) for one in tiles}, tmp_path)


def sums_text(dim: int, q_tile: int, kv_tile: int) -> str:
    """Cut out of the emitted text where sums of dq lie, and put a program after it."""
    operation = AttentionBackwardOperation("bf16", dim)  # type: ignore[arg-type]
    overlap = q_tile > 64 and dim < 128
    schedule = AttentionBackwardSchedule(q_tile, kv_tile, 1 + overlap, overlap, "direct")  # type: ignore[arg-type]
    text = render(KernelSpec("sm_90a", operation, schedule))
    constants = re.findall(
        r"^constexpr int k(?:Dim|Consumers|WgmmaM|Parts|QuerySplits|Queries|PartSums|Pieces)\b.*?$",
        text,
        re.MULTILINE,
    )
    (unpack,) = re.findall(r"^(template <class Take>.*?^\}\n)", text, re.MULTILINE | re.DOTALL)
    swapped = "#define SWAPPED" if q_tile % 64 else ""
    return "\n".join((STUBS, swapped, *constants, STRUCT, unpack, SUMS.read_text()))


FRAGMENT_STUBS = """
#include <functional>
static std::vector<std::vector<float4>> blocks;  // what each block of the cluster has laid down
static std::function<void(const void*)> stored;
namespace cute { inline uint32_t cast_smem_ptr_to_uint(const void*) { return 0; } }
struct Parameters { int dim; };
struct Sequence { int count; int columns(const Parameters&) const { return count; } };
struct Work { Sequence sequence; int column; };
struct Consumer { const Parameters& p; const Work& work; int part; };
inline float4 load_remote(uint32_t address, int rank) { return blocks[rank][address / 16]; }
inline uint32_t pair(float low, float high) { return uint32_t(low) | uint32_t(high) << 16; }
"""


@needs_compiler
def test_a_cluster_sums_every_element_of_a_gradient_once_and_stores_no_other(
    tmp_path: Path,
) -> None:
    # Head dimensions, and tiles of k and v: each by two of the sizes of clusters.
    tiles = (32, 64), (32, 128), (64, 128), (96, 64), (96, 128), (128, 128), (192, 64), (256, 128)
    sizes = (2, 4, 8)
    cases = [(*one, sizes[(at + i) % 3]) for at, one in enumerate(tiles) for i in range(2)]
    texts = {str(case): fragments_text(*case) for case in cases}
    run_each(texts, tmp_path, more=("functional",))


def fragments_text(dim: int, kv_tile: int, cluster: int) -> str:
    """Cut out of the emitted text how a cluster adds up a gradient, and put a program after it."""
    operation = AttentionBackwardOperation("bf16", dim)  # type: ignore[arg-type]
    fields = (64, kv_tile, 1, False, "direct", cluster)
    text = render(KernelSpec("sm_90a", operation, AttentionBackwardSchedule(*fields)))  # type: ignore[arg-type]
    constants = re.findall(
        r"^constexpr int k(?:Dim|Consumers|WgmmaM|KvRows|Parts|Scores|Cluster|Warps|OwnFragments"
        r"|FragmentBytes)\b.*?$",
        text,
        re.MULTILINE,
    )
    (rank,) = re.findall(r"^__device__ [^\n]* rank\(\)[^\n]*$", text, re.MULTILINE)
    functions = re.findall(
        r"^__device__ __forceinline__ void (?:lay|store_sums)\(.*?^\}\n",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert len(functions) == 2
    emitted = "\n".join(functions).replace(
        "*reinterpret_cast<uint32_t*>(to", "*counted<uint32_t*>(to"
    )
    counted = (
        "template <class T> T counted(void* at) { stored(at); return reinterpret_cast<T>(at); }"
    )
    stubs = (STUBS.replace("cutlass::bfloat16_t;", "uint16_t;"), STRUCT, FRAGMENT_STUBS, counted)
    return "\n".join((*stubs, *constants, rank, emitted, FRAGMENTS.read_text()))

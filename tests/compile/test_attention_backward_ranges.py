"""Which pairs a block of the backward pass computes, when it adds to dq, and what it stores.

The ranges, masks and turns of the emitted text run on the CPU, and what takes sums of dq apart.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

HARNESS = Path(__file__).with_name("attention_backward_ranges.cpp")
SUMS = Path(__file__).with_name("attention_backward_sums.cpp")
PROBLEMS = 25
STUBS = """
#include <algorithm>
#include <cstdint>
#include <cstring>
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#define CUTE_UNROLL
#define CUTE_NO_UNROLL
namespace cute { struct TmaDescriptor {}; }
namespace cutlass { struct bfloat16_t {}; }
using Element = cutlass::bfloat16_t;
struct { int x; } blockIdx, threadIdx;
inline int atomicAdd(int* at, int more) { const int was = *at; *at += more; return was; }
inline float __uint_as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
"""
STRUCT = "struct float4 { float x, y, z, w; };"


def host_text(spec: KernelSpec) -> str:
    """Cut out of the emitted text what needs no GPU: places, ranges, the mask, the order."""
    text = render(spec)

    def piece(pattern: str) -> str:
        (found,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
        assert isinstance(found, str)
        return found

    packed, ordered = "cu_seqlens_q" in text, "take numbers when they begin" in text
    bounds_left, bounds_right = (f"kBounds{side} = true" in text for side in ("Left", "Right"))
    assigned = [
        *(["(p).left = (l);"] if bounds_left else []),
        *(["(p).right = (r);"] if bounds_right else []),
        *(["(p).bottom_right = (b);"] if bounds_right and packed else []),
    ]
    return "\n".join(
        (
            STUBS,
            f"#define SET_BOUNDS(p, l, r, b) do {{ {' '.join(assigned)} }} while (0)",
            f"#define PROBLEMS {PROBLEMS}",
            *(["#define PACKED"] if packed else []),
            *(["#define ORDERED"] if ordered else []),
            *re.findall(
                r"^constexpr (?:int k(?:Dim|Consumers|WgmmaM|KvTile|Scores|Parts)|bool kBounds"
                r"|uint32_t kHidden).*?$",
                text,
                re.MULTILINE,
            ),
            piece(r"^(struct alignas\(128\) Parameters \{.*?^\};)"),
            *re.findall(
                r"^__device__ [^\n]*(?: left| right|bottom_right)\(const[^\n]*$", text, re.M
            ),
            piece(r"^(struct Corner .*?)$"),
            *re.findall(r"^constexpr int kBack = [^\n]*$", text, re.MULTILINE),
            piece(r"^(struct Sequence \{.*?)^__device__ [^\n]* store_box"),
            piece(r"^(struct KvPlace \{.*?)^// Rows of q, k, v or o in shared"),
            piece(r"^(struct Work \{.*?^\};)"),
            piece(r"^(__device__ __forceinline__ Work locate.*?^\}\n)"),
            piece(r"^(__device__ __forceinline__ int number\(.*?)^// Whether rows"),
            piece(r"^(__device__ __forceinline__ bool partial\(.*?^\}\n)"),
            piece(r"^(__device__ __forceinline__ void mask\(.*?^\}\n)"),
            f'#line 1 "{HARNESS}"',
            HARNESS.read_text(),
        )
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("tile", [(64, 64, 64), (80, 128, 64), (64, 128, 192)], ids=str)
def test_every_pair_is_computed_once_in_turn_and_every_gradient_stored_once(
    tile: tuple[int, int, int], mask: str, lengths: str, deterministic: bool, tmp_path: Path
) -> None:
    q_tile, kv_tile, dim = tile
    operation = AttentionBackwardOperation(
        "bf16",
        dim,
        mask,
        lengths=lengths,
        deterministic=deterministic,  # type: ignore[arg-type]
    )
    schedule = AttentionBackwardSchedule(q_tile, kv_tile, 1, overlap=q_tile > 64)  # type: ignore[arg-type]
    source, program = tmp_path / "ranges.cpp", tmp_path / "ranges"
    source.write_text(host_text(KernelSpec("sm_90a", operation, schedule)))
    built = subprocess.run(
        ["g++", "-std=c++17", "-O2", "-o", str(program), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize(
    ("dim", "q_tile", "kv_tile"),
    [
        *(
            (32, 64, 128),
            (32, 128, 128),
            (64, 96, 128),
            (64, 112, 128),
            (64, 64, 64),
            (96, 64, 128),
        ),
        *(
            (96, 64, 64),
            (128, 80, 128),
            (192, 64, 128),
            (192, 64, 64),
            (256, 64, 128),
            (256, 48, 128),
        ),
    ],
)
def test_sums_lie_where_they_are_looked_for(
    dim: int, q_tile: int, kv_tile: int, tmp_path: Path
) -> None:
    operation = AttentionBackwardOperation("bf16", dim)  # type: ignore[arg-type]
    overlap = q_tile > 64 and dim < 128
    schedule = AttentionBackwardSchedule(q_tile, kv_tile, 1, overlap, "direct")  # type: ignore[arg-type]
    text = render(KernelSpec("sm_90a", operation, schedule))
    constants = re.findall(
        r"^constexpr int k(?:Dim|Consumers|WgmmaM|Parts|QuerySplits|Queries|PartSums|Pieces)\b.*?$",
        text,
        re.MULTILINE,
    )
    (unpack,) = re.findall(r"^(template <class Take>.*?^\}\n)", text, re.MULTILINE | re.DOTALL)
    swapped = "#define SWAPPED" if q_tile % 64 else ""
    source, program = tmp_path / "sums.cpp", tmp_path / "sums"
    source.write_text("\n".join((STUBS, swapped, *constants, STRUCT, unpack, SUMS.read_text())))
    built = subprocess.run(
        ["g++", "-std=c++17", "-O1", "-o", str(program), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

"""What of a backward pass's emitted text runs on the CPU: places, ranges, the mask, the order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import attention_keys_text
from attention_keys_text import keys_text

from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

HARNESS = Path(__file__).with_name("ranges.cpp")
PROBLEMS = 25
ALONE = "constexpr int kCluster = 1;\ninline int rank() { return 0; }"  # without a cluster
STUBS = """
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#define CUTE_UNROLL
#define CUTE_NO_UNROLL
namespace cute { struct TmaDescriptor {}; }
namespace cutlass { struct bfloat16_t {}; }
using Element = cutlass::bfloat16_t;
struct { int x; } blockIdx, threadIdx;
struct SharedStorage {} shared;
inline int atomicAdd(int* at, int more) { const int was = *at; *at += more; return was; }
inline float __uint_as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
"""


def host_text(spec: KernelSpec, harness: Path = HARNESS) -> str:
    """Cut out of the emitted text what needs no GPU, and put a program after it."""
    text = render(spec)

    def piece(pattern: str) -> str:
        (found,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
        assert isinstance(found, str)
        return found

    keys = keys_text(text)
    packed, ordered = "cu_seqlens_q" in text, "take numbers when they begin" in text
    mask = cast(AttentionBackwardOperation, spec.operation).mask
    bounds_left, bounds_right = mask == "window", mask != "none"
    row = "row, " * bounds_right
    assigned = [
        *(["(p).left = (l);"] if bounds_left else []),
        *(["(p).right = (r);"] if bounds_right else []),
        *(["(p).bottom_right = (b);"] if bounds_right and packed else []),
    ]
    return "\n".join(
        (
            STUBS,
            *([attention_keys_text.STUBS] if keys else []),
            *(["#define TELLS"] if "bool hides = true" in text else []),
            f"#define SET_BOUNDS(p, l, r, b) do {{ {' '.join(assigned)} }} while (0)",
            f"#define PARTIAL(p, sequence, row, column) partial(p, sequence, {row}column)",
            f"#define MASK(s, p, sequence, row, column) mask(s, p, sequence, {row}column)",
            f"constexpr bool kBoundsLeft = {int(bounds_left)}, kBoundsRight = {int(bounds_right)};",
            f"#define BOTTOM_RIGHT(p) {'(p).bottom_right' if bounds_right and packed else 0}",
            f"#define PROBLEMS {PROBLEMS}",
            *(["#define PACKED"] if packed else []),
            *(["#define ORDERED"] if ordered else []),
            *re.findall(
                r"^constexpr (?:int k(?:Dim|Consumers|WgmmaM|KvTile|KvRows|Scores|Parts|Cluster)"
                r"|uint32_t kHidden).*?$",
                text,
                re.MULTILINE,
            ),
            piece(r"^(struct alignas\(128\) Parameters \{.*?^\};)"),
            piece(r"^(struct BoxCoord .*?)$"),
            *re.findall(r"^constexpr int kBack = [^\n]*$", text, re.MULTILINE),
            piece(r"^(struct Sequence \{.*?)^// (?:Starts the store|Where a row of k or v begins)"),
            piece(r"^(struct Work \{.*?^\};)"),
            piece(r"^(__device__ [^\n]* rank\(\)[^\n]*)$") if "rank()" in text else ALONE,
            piece(r"^(__device__ __forceinline__ Work locate.*?^\}\n)"),
            keys,
            *re.findall(
                r"^__device__ __forceinline__ void trim\(.*?^\}\n", text, re.MULTILINE | re.DOTALL
            ),
            *re.findall(r"^__device__ [^\n]* int number\([^\n]*\}$", text, re.MULTILINE),
            piece(r"^(// (?:The q tile in place n|To the dq of).*?)^// ---- Producer"),
            piece(r"^(__device__ __forceinline__ bool partial\(.*?^\}\n)"),
            piece(r"^(__device__ __forceinline__ void mask\(.*?^\}\n)"),
            f'#line 1 "{harness}"',
            harness.read_text(),
        )
    )

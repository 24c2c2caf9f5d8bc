"""What of the emitted text of attention runs on the CPU: tiles, ranges, the mask, the loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import attention_keys_text
from attention_keys_text import keys_text

from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

HARNESS = Path(__file__).with_name("ranges.cpp")
PROBLEMS = 25
STUBS = """
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#define CUTE_UNROLL
#define CUTE_NO_UNROLL
#define __launch_bounds__(...)
namespace cute { struct TmaDescriptor {}; }
namespace cutlass { struct bfloat16_t {}; }
struct { int x; } gridDim, blockIdx, threadIdx;
inline int atomicAdd(int* at, int more) { const int was = *at; *at += more; return was; }
inline float minus_infinity() { return -std::numeric_limits<float>::infinity(); }
"""


def host_text(spec: KernelSpec, harness: Path = HARNESS) -> str:
    """Cut out of the emitted text what needs no GPU, and put a program after it."""
    text = render(spec)

    def piece(pattern: str) -> str:
        (found,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
        assert isinstance(found, str)
        return found

    keys = keys_text(text)
    # Whether the loop is told of what a mask of keys hides; else that is asked for in every step.
    told = re.findall(r"bool hides\(int n\) const \{ (return .*?;) \}", text)
    packed = spec.operation.lengths == "packed"
    mask = cast(AttentionOperation, spec.operation).mask
    bounds_left, bounds_right = mask == "window", mask != "none"
    diagonal = "(of).diagonal(p)" if bounds_right and packed else "0"
    assigned = [
        *(["(p).left = (l);"] if bounds_left else []),
        *(["(p).right = (r);"] if bounds_right else []),
        *(["(p).bottom_right = (b);"] if bounds_right and packed else []),
    ]
    return "\n".join(
        (
            STUBS,
            *([attention_keys_text.STUBS] if keys else []),
            f"#define SET_BOUNDS(p, l, r, b) do {{ {' '.join(assigned)} }} while (0)",
            f"#define DIAGONAL(of) {diagonal}",
            "#define MASK(s, p, columns, row, column) "
            + ("mask(s, p, columns, row, column)" if bounds_right else "mask(s, columns, column)"),
            f"#define BOTTOM_RIGHT(p) {'(p).bottom_right' if bounds_right and packed else 0}",
            f"constexpr bool kBoundsLeft = {int(bounds_left)}, kBoundsRight = {int(bounds_right)};",
            f"#define PROBLEMS {PROBLEMS}",
            *(["#define PACKED"] if packed else []),
            *re.findall(
                r"^constexpr (?:int k(?:Dim|Consumers|WgmmaM|KvTile|Scores))"
                r".*?$",
                text,
                re.MULTILINE,
            ),
            piece(r"^(struct alignas\(128\) Parameters \{.*?^\};)"),
            piece(r"^(struct BoxCoord .*?)$"),
            *re.findall(r"^constexpr int kBack = [^\n]*$", text, re.MULTILINE),
            piece(r"^(struct Sequence \{.*?)^// Rows of a tensor in shared memory"),
            piece(r"^(__device__ __forceinline__ void mask\(.*?^\}\n)"),
            keys,
            piece(r"^(struct Tiles \{.*?^\};)"),
            piece(r"^(struct alignas\(16\) Work \{.*?^\};)"),
            piece(r"^(__device__ __forceinline__ Work locate.*?^\}\n)"),
            piece(r"^(__device__ __forceinline__ Work share.*?^\}\n)"),
            f'void visit(const Work& work);\n#line 1 "{harness}"',
            harness.read_text(),
            "struct Steps {",
            "  static void skip() { ++skips; }",
            "  static void first(int n, bool masked) { visits.push_back({n, masked, hides(n)}); }",
            "  static void weigh(int n, bool masked) { first(n, masked); }",
            "  template <bool kMasked, bool kEvery = false>",
            "  static void next(int n) { visits.push_back({n, kMasked, kEvery || hides(n)}); }",
            "  static bool hides(int n) {",
            *(told or [f"(void)n; return {'true' if keys else 'false'};"]),
            "  }",
            f"  {'static int shown_begin, shown_end;' if told else ''}",
            "};",
            "int Steps::shown_begin, Steps::shown_end;" if told else "",
            "void visit(const Work& work) {",
            "Steps::shown_begin = work.shown_begin, Steps::shown_end = work.shown_end;"
            if told
            else "",
            *(
                found.replace("c.skip()", "Steps::skip()")
                for found in re.findall(r"  for \(int i = 0; i < work\.skipped.*?\n", text)
            ),
            "if (work.end > work.begin) {",
            re.sub(
                r"c, scores, (?:output, )?(?:product, )?weights, rows, "
                r"|Steps::first\(c, scores, n\);",
                "",
                piece(r"(      int n = work\.end - 1;.*?)      const int stage"),
            ),
            "}}",
        )
    )

"""What of the emitted text of attention runs on the CPU: tiles, ranges, the mask, the loop."""

from __future__ import annotations

import re
from pathlib import Path

import attention_keys_text
from attention_keys_text import keys_text

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
    bounds_left, bounds_right = (f"kBounds{side} = true" in text for side in ("Left", "Right"))
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
            f"#define PROBLEMS {PROBLEMS}",
            *(["#define PACKED"] if packed else []),
            *re.findall(
                r"^constexpr (?:int k(?:Dim|Consumers|WgmmaM|KvTile|Scores)|bool k(?:Bounds|Try))"
                r".*?$",
                text,
                re.MULTILINE,
            ),
            piece(r"^(struct alignas\(128\) Parameters \{.*?^\};)"),
            *re.findall(
                r"^__device__ [^\n]*(?: left| right|bottom_right)\(const[^\n]*$", text, re.M
            ),
            piece(r"^(struct Corner .*?)$"),
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
            piece(r"(  for \(int i = 0; i < work\.skipped.*?\n)").replace(
                "c.skip()", "Steps::skip()"
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

"""What products read, of a pair's block and with v in registers, is what was put there.

The emitted descriptors, writes and products run on the CPU, with TMA's swizzle, stmatrix and wgmma
as the PTX ISA describes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host import needs_compiler, run_each

from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

MEMORY = Path(__file__).with_name("memory.cpp")
PAIR = Path(__file__).with_name("pair.cpp")
HELD = Path(__file__).with_name("held.cpp")
STUBS = """
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#define CUTE_UNROLL
#define CUTE_NO_UNROLL
struct { int x; } blockIdx, threadIdx;
struct float4 { float x, y, z, w; };
using Element = int16_t;
alignas(1024) static uint8_t memory[232448];
struct FullBarrier { void wait(uint32_t) {} };
using EmptyBarrier = FullBarrier;
namespace cute {
struct TmaDescriptor {};
inline uint32_t cast_smem_ptr_to_uint(const void* at) { return static_cast<const uint8_t*>(at) - memory; }
struct GmmaDescriptor {
  struct { unsigned start_address_, leading_byte_offset_, stride_byte_offset_, layout_type_; } bitfield{};
  operator uint64_t() const {
    return bitfield.start_address_ | uint64_t(bitfield.leading_byte_offset_) << 16 |
           uint64_t(bitfield.stride_byte_offset_) << 32 | uint64_t(bitfield.layout_type_) << 62;
  }
};
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
inline void tma_store_arrive() {}
}  // namespace cute
namespace cutlass { namespace arch { inline void fence_view_async_shared() {} } }
void stmatrix(int transposed, std::vector<uint32_t> operands);
void ldmatrix(uint32_t address);
template <int n, bool a_k_major, bool b_k_major> static void multiply(uint64_t a, uint64_t b, float* d, bool add);
template <int n> void multiply_held(const uint32_t (&a)[4], uint64_t b, float* d, bool add);
struct Parameters { cute::TmaDescriptor dk_map, dv_map; };
struct BoxCoord {};
struct Sequence { template <int kRows> BoxCoord columns_at(int) const { return {}; } };
struct Scaling { explicit Scaling(const Parameters&) {} };
template <int kRows> struct Tile {
  static constexpr int kBoxBytes = kRows * kSpan, kBytes = kBoxes * kBoxBytes;
  static constexpr int columns(int step) { return (step * 32 / kSpan * kBoxBytes + step * 32 % kSpan) / 16; }
};
template <int kCount> void fence(float (&)[kCount]) {}
inline uint32_t pair(float low, float high) { return uint16_t(int(low)) | uint32_t(uint16_t(int(high))) << 16; }
inline int __shfl_sync(unsigned, int x, int) { return x; }
void store_box(const cute::TmaDescriptor&, const uint8_t* box, int column, BoxCoord coord, int head);
"""  # noqa: E501
FUNCTIONS = (  # those of a pair; the first two are anybody's
    "matrix", "multiply_scores", "multiply_query", "write", "multiply_gradient", "own_ds",
    "own_p", "staged_p", "multiply_own_query", "multiply_peer_query", "stage",
    "store",
)  # fmt: skip


def emulated(text: str, name: str) -> str:
    """Return a struct like the emitted instruction `name`, of the same shape and majors."""
    found = re.search(rf"^struct {name} \{{.*?m64n(\d+)k16.*?, 1, 1((?:, \d)*);", text, re.M | re.S)
    assert found
    a, b = found[2].replace(",", "").split()  # 1: the operand is not K-major
    majors = ", ".join({"0": "true", "1": "false"}[x] for x in (a, b))
    count = int(found[1]) // 2
    return (
        f"struct {name} {{ static constexpr int kK = 16;\n"
        f"static void fma(uint64_t a, uint64_t b, float (&d)[{count}], bool add) "
        f"{{ multiply<{found[1]}, {majors}>(a, b, d, add); }} }};"
    )


def emulated_held(text: str) -> str:
    """Return a struct like the emitted instruction that takes v from registers."""
    found = re.search(r"^struct HeldWgmma \{.*?m64n(\d+)k16", text, re.MULTILINE | re.DOTALL)
    assert found
    return (
        "struct HeldWgmma { static constexpr int kK = 16;\n"
        f"static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[{int(found[1]) // 2}], "
        f"bool add) {{ multiply_held<{found[1]}>(a, b, d, add); }} }};"
    )


class Emitted:
    """The text of a kernel, to be cut up."""

    def __init__(self, spec: KernelSpec) -> None:
        self.text = render(spec)

    def piece(self, pattern: str) -> str:
        (found,) = re.findall(pattern, self.text, re.MULTILINE | re.DOTALL)
        assert isinstance(found, str)
        return found

    def functions(self, names: Sequence[str]) -> str:
        """Functions whose asm is a call of what the harness has instead."""
        text = "\n".join(
            self.piece(
                rf"^((?:template <[^\n]*>\n?)?__device__ __forceinline__ [^\n]*\b{name}\("
                r"(?:[^\n]*\}\n|.*?^\}\n))"
            )
            for name in names
        )
        text = re.sub(  # the operands of an stmatrix, and whether it is transposed
            r'asm volatile\("stmatrix[^"]*\.x\d(\.trans)?\.[^"]*"\s*::(.*?)(?::\s*"memory"\s*)\);',
            lambda found: "stmatrix({}, {{{}}});".format(
                int(found[1] is not None), re.sub(r'"r"', "uint32_t", found[2])
            ),
            text,
            flags=re.DOTALL,
        )
        assert "asm" not in text
        return text

    def storage(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """What everything else stands on: constants, shared memory, instructions."""
        constants = re.findall(
            r"^constexpr int k(?:Dim|BoxColumns|Consumers|WgmmaM|Stages|KvRows|Parts|Scores|"
            r"QuerySplits|Queries|KvBytes|Statistics|StatisticsBytes|DsBoxBytes)\b[^\n]*$",
            self.text,
            re.MULTILINE,
        )
        stubs, tile, after = STUBS.partition("template <int kRows> struct Tile {")
        return (
            *(stubs, *(line for line in constants if "Tile<" not in line), tile + after),
            *(line for line in constants if "Tile<" in line),
            f"constexpr bool kSwapped = {'true' if 'dq^T = k^T ds^T' in self.text else 'false'};",
            "struct Position { int stage; uint32_t phase; };",
            self.piece(r"^(using Weights [^\n]*)$"),
            *(self.piece(rf"^(struct {name} \{{.*?^\}};)") for name in ("Work", "SharedStorage")),
            *instructions,
        )

    def consumer(self) -> tuple[str, ...]:
        """What a consumer works with, and how it is made."""
        made = self.piece(r"^__device__ __forceinline__ void consume\([^\n]*\n(.*?)^  float dk\[")
        return (
            *(self.piece(rf"^(struct {name} \{{.*?^\}};)") for name in ("Step", "Consumer")),
            "static Consumer made(const Parameters& p, SharedStorage& shared, const Work& work, "
            f"int consumer) {{\n{made}  return c;\n}}",
        )


def pair_text(spec: KernelSpec) -> str:
    """What makes descriptors, writes and multiplies in a pair's block, and its harness."""
    emitted = Emitted(spec)
    instructions = [
        emulated(emitted.text, name) for name in ("ScoresWgmma", "KeyWgmma", "QueryWgmma")
    ]
    own = emitted.piece(r"^  const int own = (16 \* c\.columns[^;]*);")
    return "\n".join(
        (
            *emitted.storage(instructions),
            emitted.functions(FUNCTIONS[:2]),
            *emitted.consumer()[:2],
            emitted.functions(FUNCTIONS[2:]),
            emitted.consumer()[2],
            f"#define STORE_OWN ({own})",
            *(f'#line 1 "{file}"\n{file.read_text()}' for file in (MEMORY, PAIR)),
        )
    )


def held_text(spec: KernelSpec) -> str:
    """What takes v into registers and multiplies with it, and its harness."""
    emitted = Emitted(spec)
    instructions = [emulated(emitted.text, "ScoresWgmma"), emulated_held(emitted.text)]
    held = re.sub(
        r'asm volatile\("ldmatrix.*?: "r"\(address\)\s*: "memory"\);',
        "ldmatrix(address);",
        emitted.piece(r"^(struct Held \{.*?^\};)"),
        flags=re.DOTALL,
    )
    assert "asm" not in held
    return "\n".join(
        (
            *emitted.storage(instructions),
            *(emitted.functions(FUNCTIONS[:2]), *emitted.consumer(), held),
            *(f'#line 1 "{file}"\n{file.read_text()}' for file in (MEMORY, HELD)),
        )
    )


@needs_compiler
def test_products_of_a_pair_read_what_was_written(tmp_path: Path) -> None:
    texts = {}
    for dim, q_tile, stages in (
        (192, 64, 2), (192, 128, 1), (256, 32, 3), (256, 48, 2), (256, 64, 1), (256, 96, 1),
    ):  # fmt: skip
        operation = AttentionBackwardOperation("bf16", dim)  # type: ignore[arg-type]
        fields: Any = (q_tile, 128, stages, False, "direct")
        schedule = AttentionBackwardSchedule(*fields, cluster_split="rows")
        texts[f"{dim}, {fields}"] = pair_text(KernelSpec("sm_90a", operation, schedule))
    run_each(texts, tmp_path)


@needs_compiler
def test_v_in_registers_is_v(tmp_path: Path) -> None:
    texts = {}
    for dim, q_tile, kv_tile, held in (
        (32, 64, 128, "half"), (32, 64, 64, "all"), (64, 96, 128, "all"), (64, 128, 128, "half"),
        (96, 64, 128, "half"), (128, 64, 128, "half"), (128, 48, 128, "all"),
    ):  # fmt: skip
        operation = AttentionBackwardOperation("bf16", dim)  # type: ignore[arg-type]
        fields: Any = (q_tile, kv_tile, 2, False, "direct")
        schedule = AttentionBackwardSchedule(*fields, v_in_registers=held)  # type: ignore[arg-type]
        text = held_text(KernelSpec("sm_90a", operation, schedule))
        texts[f"{dim}, {fields[:2]}, {held}"] = text
    run_each(texts, tmp_path)

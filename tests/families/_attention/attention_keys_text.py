"""What of the emitted text of masks of keys runs on the CPU, in both passes' programs of ranges."""

from __future__ import annotations

import re

# One thread is all of its block.
STUBS = """
#define KEYS
#define __shared__ static
struct int4 { int x, y, z, w; };
struct uint4 { uint32_t x, y, z, w; };
struct { int x = 1; } blockDim;
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline void __syncthreads() {}
inline uint32_t __vsetne4(uint32_t x, uint32_t y) {
  uint32_t bytes = 0;
  for (int i = 0; i < 32; i += 8) bytes |= uint32_t((x >> i & 255) != (y >> i & 255)) << i;
  return bytes;
}
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __reduce_min_sync(uint32_t, int x) { return x; }
inline int __reduce_max_sync(uint32_t, int x) { return x; }
inline int __reduce_add_sync(uint32_t, int x) { return x; }
inline void atomicMin(int* at, int x) { *at = min(*at, x); }
inline void atomicMax(int* at, int x) { *at = max(*at, x); }
"""


def keys_text(text: str) -> str:
    """Cut out how rows of a mask are looked at; nothing where the kernel leaves out no tiles."""
    if "find_keys" not in text:
        return ""
    patterns = (
        r"^(struct Keys \{.*?^\};)",
        r"^(__device__ __forceinline__ void find_keys\(.*?^\}\n)",
        r"^(__device__ __forceinline__ int4 keys_of\(.*?^\}\n)",
    )
    pieces = [re.findall(one, text, re.MULTILINE | re.DOTALL) for one in patterns]
    (number,) = re.findall(
        r"^  [^\n]*int64_t number_of\(.*?^  \}\n", text, re.MULTILINE | re.DOTALL
    )
    return "\n".join((f"struct Score {{\n{number}}};", *(piece for (piece,) in pieces)))
